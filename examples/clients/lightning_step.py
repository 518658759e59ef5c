"""A Lightning module whose training step is a funcamp step, by manual optimization.

    python examples/clients/lightning_step.py

Forward and backward pass, clipping, the optimizer and the scale are one compiled step. The Trainer's precision stays
"32-true", since the step has its policy. Data, logging, evaluation, callbacks and checkpoints are Lightning's; the
module shares the state's memory, so they see the trained values. It is for one process.

To keep Lightning's own loop and replace only the scaler, see examples/lightning_mixed.py.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import funcamp


def criterion(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), target)


class Net(pl.LightningModule):
    metrics: funcamp.Metrics

    def __init__(self, config: funcamp.ScalerConfig = funcamp.ScalerConfig(), wrap: Any = funcamp.jit) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
        self.config, self.wrap = config, wrap

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make the step; Lightning calls this when the module is on its device and has a checkpoint's values."""
        loss_fn = funcamp.module_loss(
            self.layers, lambda output, target: nn.functional.mse_loss(output.float(), target)
        )
        adamw = funcamp.stateless(torch.optim.AdamW, lr=1e-2)
        self.step = funcamp.make_train_step(loss_fn, adamw, self.config, policy="float16", max_norm=1.0)
        self.run, self.state = self.wrap(self.step), self.step.init(consume=True)
        return StepOptimizer(self)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        self.state, self.metrics = self.run(self.state, tuple(batch))
        self.optimizers().step()  # type: ignore[union-attr]  # counts the step, for Lightning
        return self.metrics.loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("validation", self.step.loss(self.state, tuple(batch)))


class StepOptimizer(torch.optim.Optimizer):
    """What Lightning sees of the step's optimizer: something that steps, and the state for a checkpoint."""

    def __init__(self, module: Net) -> None:
        super().__init__(module.parameters(), {})
        self.module = module

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing but what Lightning asks for: `training_step` has taken the step."""
        if closure is not None:
            closure()

    def state_dict(self) -> dict[str, Any]:
        """Return moments, counts and the scale; parameters and buffers are in the module's own state_dict."""
        saved = self.module.step.state_dict(self.module.state)
        return {name: value for name, value in saved.items() if not name.startswith(("params.", "buffers."))}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from this, with the parameters and buffers that the module has."""
        step, own = self.module.step, self.module.state
        self.module.state = step.load_state_dict(step.state_dict(own) | saved, like=own, consume=True)


def batches(steps: int) -> DataLoader[Any]:
    x = torch.randn(steps * 32, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=32)


def main(steps: int = 300, folder: str = "demo-out/lightning_step", wrap: Any = funcamp.jit) -> dict[str, float]:
    """Fit a small network from a scale that overflows at first; return losses and the count of skipped steps."""
    torch.manual_seed(0)
    module = Net(funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=50), wrap)
    trainer = pl.Trainer(
        max_epochs=1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, batches(steps), batches(4))
    assert trainer.global_step == steps
    return {
        "loss": module.metrics.loss.item(),
        "validation": trainer.callback_metrics["validation"].item(),
        "skipped": module.state.skipped.item(),
    }


if __name__ == "__main__":
    print(main())
