"""Hugging Face Accelerate with funcamp's scaler: set `accelerator.scaler` before `prepare`.

Accelerate takes a step as skipped if `optimizer.step` was not called. With selection, and with a fused kernel, it is
always called: `Accelerator` below uses the scaler's flag instead, a tensor that is read only when it is needed.
Watch the schedule: it does not advance at skipped steps, fused optimizer or not, and ends at the count of applied ones.
"""

from __future__ import annotations

from typing import Any

import accelerate  # type: ignore[import-untyped]
import torch
from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import funcamp


class FlaggedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """An optimizer whose step_was_skipped is the scaler's found_inf, read only when it is used."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        if self.scaler is not None and self.gradient_state.sync_gradients:
            self._is_overflow = self.scaler.metrics().found_inf != 0


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """An Accelerator that returns `FlaggedOptimizer`s."""

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        prepared = super().prepare_optimizer(optimizer, device_placement)
        prepared.__class__ = FlaggedOptimizer
        return prepared


def main(steps: int = 200, fused: bool = True) -> dict[str, float]:
    """Fit a small network, overflowing at first; return the losses and the schedule's count."""
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
    device = accelerator.device.type
    if device == "cpu":
        accelerator.native_amp = True  # on a CPU Accelerate accepts "fp16" and silently trains in float32
    accelerator.scaler = funcamp.GradScaler(device, init_scale=2.0**24, growth_interval=50, skip="select")

    x = torch.randn(2 * steps * 32, 8)
    data = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=32)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    losses, found_inf = [], []
    for inputs, targets in data:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()  # reads whether the step was skipped: the only host read of this loop
            optimizer.zero_grad()
        losses.append(loss.detach())
        if accelerator.sync_gradients:
            found_inf.append(accelerator.scaler.metrics().found_inf)
    result = {
        "loss_first": losses[0].item(),
        "loss_last": torch.stack(losses[-10:]).mean().item(),
        "skipped": sum(found_inf).item(),
        "scheduled": schedule.scheduler.last_epoch,
        "scale": accelerator.scaler.get_scale(),
    }
    assert result["loss_last"] < result["loss_first"], result
    assert result["scheduled"] == steps - result["skipped"], result
    return result


if __name__ == "__main__":
    print(main())
