"""PyTorch Lightning with funcamp's scaler: pass it to the precision plugin, and nothing else changes.

Watch the scale, which a callback logs without waiting for the device: it starts so high that the first steps overflow;
each is skipped and halves it. `self.log` would read it on the host; a row of `MetricReader` arrives a few steps later
and is logged then. Lightning's schedulers advance at skipped steps too, with torch's scaler as with this one.
"""

from __future__ import annotations

from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

import funcamp


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], *_: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # capturable: AdamW's step counts are on the parameters' device, so that a skipped step can restore them
        return torch.optim.AdamW(self.parameters(), lr=1e-2, capturable=self.device.type == "cuda")


class ScalerLog(pl.Callback):
    """Log the loss and the scaler's state of every batch."""

    def __init__(self) -> None:
        self.reader = funcamp.MetricReader()
        self.rows: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, _module: Any, outputs: Any, *_: Any) -> None:
        metrics = cast(Any, trainer.precision_plugin).scaler.metrics()
        self.reader.put({"step": trainer.global_step, "loss": outputs["loss"], **metrics._asdict()})
        self.write(trainer, self.reader.ready())

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.write(trainer, self.reader.drain())

    def write(self, trainer: pl.Trainer, rows: list[dict[str, Any]]) -> None:
        self.rows += rows
        for row in rows:
            cast(Any, trainer.logger).log_metrics(row, step=row["step"])


def main(steps: int = 300, folder: str = "demo-out/lightning") -> dict[str, float]:
    """Fit a small network from a scale that overflows at first; return the callback's values."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scaler = funcamp.GradScaler(device, init_scale=2.0**24, growth_interval=50, skip="select")
    x = torch.randn(steps * 32, 8)
    batches = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=32)
    trainer = pl.Trainer(
        accelerator=device,
        max_epochs=1,
        plugins=[MixedPrecision("16-mixed", device, scaler)],
        callbacks=[log := ScalerLog()],
        gradient_clip_val=1.0,
        logger=CSVLogger(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), batches)
    losses, skipped = [row["loss"] for row in log.rows], sum(row["found_inf"] for row in log.rows)
    assert sum(losses[-10:]) / 10 < losses[0], losses
    return {"steps": len(losses), "skipped": skipped, "loss_first": losses[0], "loss_last": losses[-1]}


if __name__ == "__main__":
    print(main())
