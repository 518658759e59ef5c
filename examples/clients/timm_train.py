"""timm's train.py with funcamp's scaler: `NativeScaler` below in place of `timm.utils.NativeScaler`.

    python examples/clients/timm_train.py

In timm's own script this is a line after its imports, in place of the class that they bind to this name:

    from timm_train import NativeScaler

The loop is that script's: autocast, a loss scaler that is called with the loss, accumulation, clipping, a scheduler
that counts updates, and timm's CheckpointSaver, whose files load with either scaler.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from timm.models import create_model, model_parameters, resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver
from timm.utils import NativeScaler as TimmScaler
from torch import Tensor, nn

import funcamp

UPDATES, EPOCHS, ACCUMULATE = 8, 3, 2


class NativeScaler(TimmScaler):  # type: ignore[misc]
    """timm's loss scaler on `funcamp.GradScaler`; options are those of `GradScaler`."""

    def __init__(self, device: str = "cuda", **options: Any) -> None:
        self._scaler = funcamp.GradScaler(device, **options)


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Return images of one color on noise, and which color."""
    rng = torch.Generator().manual_seed(number)
    labels = torch.randint(3, (8,), generator=rng)
    return nn.functional.one_hot(labels, 3)[..., None, None] + 0.5 * torch.randn(8, 3, 16, 16, generator=rng), labels


def train(loss_scaler: Any, folder: Path, last: int = EPOCHS, resume: Path | None = None) -> list[dict[str, Any]]:
    """Train up to an epoch as train.py does; return the state after every update."""
    torch.manual_seed(0)
    options = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "drop_rate": 0.1}
    model = create_model("vit_tiny_patch16_224", img_size=16, num_classes=3, **options)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-2, weight_decay=0.05)
    scheduler, _ = create_scheduler_v2(optimizer, num_epochs=EPOCHS, step_on_epochs=False, updates_per_epoch=UPDATES)
    saver = CheckpointSaver(model, optimizer, amp_scaler=loss_scaler, checkpoint_dir=folder, recovery_dir=folder)
    first = 0
    if resume is not None:
        first = resume_checkpoint(model, str(resume), optimizer, loss_scaler)
        scheduler.step_update(first * UPDATES)
    seen = []
    for epoch in range(first, last):
        torch.manual_seed(epoch)
        model.train()
        optimizer.zero_grad()
        for index in range(UPDATES * ACCUMULATE):
            number = epoch * UPDATES * ACCUMULATE + index
            x, y = (part.to(device) for part in batch(number))
            need_update = (index + 1) % ACCUMULATE == 0
            with torch.autocast(device, torch.float16):
                loss = nn.functional.cross_entropy(model(x), y) / ACCUMULATE
            parameters = model_parameters(model, exclude_head=False)
            loss_scaler(loss, optimizer, clip_grad=1.0, parameters=parameters, need_update=need_update)
            if need_update:
                optimizer.zero_grad()
                update = (number + 1) // ACCUMULATE
                scheduler.step_update(num_updates=update)
                params = [param.detach().clone() for param in model.parameters()]
                seen.append({"loss": loss.detach(), "params": params, "scaler": loss_scaler.state_dict()})
        saver.save_checkpoint(epoch, metric=float(epoch))
    return seen


def main(folder: Path = Path("demo-out/timm_train")) -> dict[str, float]:
    """Train from a scale that overflows at first; return the losses and the last scale."""
    folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    seen = train(NativeScaler(device, init_scale=2.0**24), folder)
    first, last = (ACCUMULATE * seen[place]["loss"].item() for place in (0, -1))
    assert last < first / 2, (first, last)
    return {"loss_first": first, "loss_last": last, "scale": seen[-1]["scaler"]["scale"]}


if __name__ == "__main__":
    print(main())
