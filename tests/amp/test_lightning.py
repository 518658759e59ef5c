"""PyTorch Lightning with `GradScaler`: what its own loop does with torch's scaler, bit for bit."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

from tests.support.float16_run import (
    FUNCAMP,
    NUMBERS,
    OPTIMIZERS,
    SCALERS,
    SIZE,
    STEPS,
    assert_moves,
    make_data,
    make_model,
)
from tests.support.helpers import assert_same, clone
from tests.support.quiet_lightning import IGNORED, trainer

pytestmark = [
    *IGNORED,
    pytest.mark.usefixtures("one_thread"),
    # The first step is skipped, with torch's scaler too.
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning"),
]


class Net(pl.LightningModule):
    def __init__(self, optimizer: str = "adamw", schedule: bool = False) -> None:
        super().__init__()
        self.body = make_model()
        self.optimizer, self.schedule = optimizer, schedule

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        return torch.nn.functional.mse_loss(self.body(x).float(), y)

    def configure_optimizers(self) -> Any:
        made = OPTIMIZERS[self.optimizer](self.parameters())
        if not self.schedule:
            return made
        schedule = torch.optim.lr_scheduler.OneCycleLR(made, max_lr=3e-2, total_steps=2 * STEPS)
        return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class TwoOptimizers(Net):
    """Manual optimization: Lightning steps and updates the scaler at each optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [OPTIMIZERS[name](self.body[index].parameters()) for index, name in ((0, "adamw"), (2, "sgd"))]

    def training_step(self, batch: Any, index: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            optimizer.step()


class Run(pl.Callback):
    """A run of a module; `rows` with the scaler, the parameters and the learning rates after every batch."""

    def __init__(
        self, scaler: Any, module: Net, folder: Path, epochs: int = 1, start: Path | None = None, **options: Any
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
        self.trainer = trainer(folder, plugins=plugins, callbacks=[self], max_epochs=epochs, **options)
        self.trainer.fit(module, DataLoader(TensorDataset(*make_data()), batch_size=SIZE), ckpt_path=start)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        plugin: Any = trainer.precision_plugin
        self.rows.append(
            {
                "scaler": plugin.scaler.state_dict(),
                "params": clone(dict(module.named_parameters())),
                "lr": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
            }
        )


def assert_same_run(actual: Run, expected: Run) -> None:
    assert_same(actual.rows, expected.rows)
    for optimizer, other in zip(actual.trainer.optimizers, expected.trainer.optimizers, strict=True):
        assert_same(optimizer.state_dict(), other.state_dict())


VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd, schedule": (functools.partial(Net, "sgd", schedule=True), {}),
    "fused": (functools.partial(Net, "fused"), {}),
    "clip by norm": (Net, {"gradient_clip_val": 0.1}),
    "accumulate": (Net, {"accumulate_grad_batches": 2}),
    "two optimizers by hand": (TwoOptimizers, {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_run_equals_the_one_with_torchs_scaler(variant: str, tmp_path: Path) -> None:
    module, options = VARIANTS[variant]
    expected = Run(SCALERS["torch"](**NUMBERS), module(), tmp_path, **options)
    assert_moves([row["scaler"]["scale"] for row in expected.rows])
    for make in FUNCAMP.values():
        actual = Run(make(**NUMBERS), module(), tmp_path, **options)
        assert len(actual.rows) == STEPS
        assert_same_run(actual, expected)


@pytest.mark.parametrize(("first", "second"), [*itertools.product(["torch", "select"], repeat=2), ("host", "default")])
@pytest.mark.parametrize("module", [Net, TwoOptimizers], ids=["", "two optimizers by hand"])
def test_resumed_run_equals_the_uninterrupted_one(module: Any, first: str, second: str, tmp_path: Path) -> None:
    numbers, path = NUMBERS | {"growth_interval": 7}, tmp_path / "half.ckpt"
    whole = Run(SCALERS["torch"](**numbers), module(), tmp_path, epochs=2)
    before = Run(SCALERS[first](**numbers), module(), tmp_path)
    before.trainer.save_checkpoint(path)
    assert whole.rows[STEPS - 1]["scaler"]["_growth_tracker"] > 0
    # the file's numbers count, not the constructor's
    after = Run(SCALERS[second](), module(), tmp_path, epochs=2, start=path)
    after.rows[:0] = before.rows
    assert_same_run(after, whole)
