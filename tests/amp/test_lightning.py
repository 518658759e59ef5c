"""PyTorch Lightning with `GradScaler`: what its own loop does with torch's scaler, bit for bit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import funcamp
from tests.support.helpers import assert_same, clone
from tests.support.host_reads import host_reads

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Lightning's own use of a deprecated part of torch 2.13's pytree.
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning"),
    # The data is in memory: worker processes would cost more than they bring.
    pytest.mark.filterwarnings("ignore:The '[a-z_]+' does not have many workers:UserWarning"),
]

BATCHES, SIZE = 24, 4
HUGE = 11  # this batch overflows float16 in the forward pass, whatever the scale

Scaler = torch.amp.GradScaler
FUNCAMP: dict[str, Callable[..., Scaler]] = {
    skip or "default": functools.partial(funcamp.GradScaler, skip=skip) for skip in (None, "host", "select")
}
MAKERS = {"torch": Scaler, **FUNCAMP}


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCHES * SIZE, 4, generator=generator)
    y = x.sum(1, keepdim=True)
    x[HUGE * SIZE] = 1e30
    return DataLoader(TensorDataset(x, y), batch_size=SIZE)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}


class Net(pl.LightningModule):
    def __init__(self, optimizer: str = "adamw", schedule: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(4, 16)
        self.head = torch.nn.Linear(16, 1)
        self.optimizer, self.schedule = optimizer, schedule

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return torch.nn.functional.mse_loss(self.head(torch.nn.functional.gelu(self.body(x))).float(), y)

    def training_step(self, batch: Any, index: int) -> Tensor | None:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        made = OPTIMIZERS[self.optimizer](self.parameters())
        if not self.schedule:
            return made
        schedule = torch.optim.lr_scheduler.OneCycleLR(made, max_lr=3e-2, total_steps=2 * BATCHES)
        return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class TwoOptimizers(Net):
    """Manual optimization: Lightning steps and updates the scaler at each optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.body.parameters(), lr=1e-2),
            torch.optim.SGD(self.head.parameters(), lr=1e-2, momentum=0.9),
        ]

    def training_step(self, batch: Any, index: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


class Recorder(pl.Callback):
    """The scaler, the parameters and the learning rates after every batch."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        plugin = trainer.precision_plugin
        assert isinstance(plugin, MixedPrecision)
        assert plugin.scaler is not None
        self.rows.append(
            {
                "scaler": plugin.scaler.state_dict(),
                "params": clone(dict(module.named_parameters())),
                "lr": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
            }
        )

    def changed(self) -> list[bool]:
        """Whether the parameters moved, from the second batch on."""
        params = [torch.cat([p.flatten() for p in row["params"].values()]) for row in self.rows]
        return [not torch.equal(before, after) for before, after in itertools.pairwise(params)]


def make_trainer(scaler: Scaler, callbacks: list[pl.Callback], folder: Path, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **{"max_epochs": 1, "devices": 1} | options,
    )


def train(
    scaler: Scaler,
    module: Net,
    folder: Path,
    epochs: int = 1,
    start: Path | None = None,
    **options: Any,
) -> tuple[Recorder, pl.Trainer]:
    recorder = Recorder()
    trainer = make_trainer(scaler, [recorder], folder, max_epochs=epochs, **options)
    trainer.fit(module, data(), ckpt_path=start)
    return recorder, trainer


NUMBERS: dict[str, Any] = {"init_scale": 2.0**19, "growth_interval": 5}
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (Net, {}),
    "sgd": (functools.partial(Net, "sgd"), {}),
    "fused": (functools.partial(Net, "fused"), {}),
    "clip by norm": (Net, {"gradient_clip_val": 0.1}),
    "clip by value": (Net, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
    "accumulate": (Net, {"accumulate_grad_batches": 2}),
    "two optimizers by hand": (TwoOptimizers, {}),
}


def assert_same_run(actual: tuple[Recorder, pl.Trainer], expected: tuple[Recorder, pl.Trainer]) -> None:
    assert_same(actual[0].rows, expected[0].rows)
    # At the end only: before the first applied step, selection has made the state that torch makes in it.
    for optimizer, other in zip(actual[1].optimizers, expected[1].optimizers, strict=True):
        assert_same(optimizer.state_dict(), other.state_dict())


@pytest.mark.parametrize("variant", VARIANTS)
def test_run_equals_the_one_with_torchs_scaler(variant: str, tmp_path: Path) -> None:
    module, options = VARIANTS[variant]
    expected = train(Scaler("cpu", **NUMBERS), module(), tmp_path, **options)
    scales = [row["scaler"]["scale"] for row in expected[0].rows]
    assert scales[0] < NUMBERS["init_scale"] or options.get("accumulate_grad_batches")
    assert any(b < a for a, b in itertools.pairwise(scales[HUGE - 2 :]))
    assert any(b > a for a, b in itertools.pairwise(scales))
    assert {True, False} <= set(expected[0].changed())
    for make in FUNCAMP.values():
        actual = train(make("cpu", **NUMBERS), module(), tmp_path, **options)
        assert len(actual[0].rows) == BATCHES
        assert_same_run(actual, expected)


def test_schedule_advances_with_every_batch_as_with_torchs_scaler(tmp_path: Path) -> None:
    module, numbers = functools.partial(Net, "sgd", schedule=True), NUMBERS | {"init_scale": 2.0**10}
    expected = train(Scaler("cpu", **numbers), module(), tmp_path)
    assert False in expected[0].changed()
    assert len({row["lr"][0] for row in expected[0].rows}) == BATCHES
    for make in FUNCAMP.values():
        assert_same_run(train(make("cpu", **numbers), module(), tmp_path), expected)


def test_skipped_first_step_warns_of_the_scheduler_where_step_is_not_called(tmp_path: Path) -> None:
    module = functools.partial(Net, "sgd", schedule=True)
    early = r"lr_scheduler.step\(\)` before `optimizer.step\(\)"
    with pytest.warns(UserWarning, match=early):
        expected = train(Scaler("cpu", **NUMBERS), module(), tmp_path)
    with pytest.warns(UserWarning, match=early):
        assert_same_run(train(FUNCAMP["host"]("cpu", **NUMBERS), module(), tmp_path), expected)
    assert_same_run(train(FUNCAMP["select"]("cpu", **NUMBERS), module(), tmp_path), expected)


def test_clipping_with_a_fused_optimizer_is_refused_by_lightning(tmp_path: Path) -> None:
    for make in MAKERS.values():
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            train(make("cpu"), Net("fused"), tmp_path, gradient_clip_val=0.1)


@pytest.mark.parametrize(("first", "second"), [*itertools.product(["torch", "select"], repeat=2), ("host", "default")])
@pytest.mark.parametrize("module", [Net, TwoOptimizers], ids=["", "two optimizers by hand"])
def test_resumed_run_equals_the_uninterrupted_one(module: Any, first: str, second: str, tmp_path: Path) -> None:
    numbers = NUMBERS | {"growth_interval": 7}
    whole = train(Scaler("cpu", **numbers), module(), tmp_path, epochs=2)
    before = train(MAKERS[first]("cpu", **numbers), module(), tmp_path, epochs=1)
    before[1].save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)["MixedPrecision"]
    assert saved == whole[0].rows[BATCHES - 1]["scaler"]
    assert saved["_growth_tracker"] > 0
    # the file's numbers count, not the constructor's
    after = train(MAKERS[second]("cpu"), module(), tmp_path, epochs=2, start=tmp_path / "half.ckpt")
    assert_same(before[0].rows + after[0].rows, whole[0].rows)
    for optimizer, other in zip(after[1].optimizers, whole[1].optimizers, strict=True):
        assert_same(optimizer.state_dict(), other.state_dict())


class Loop(pl.Callback):
    """How many host reads there were when each batch began."""

    def __init__(self, reads: list[str]) -> None:
        self.reads = reads
        self.before: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.before.append(len(self.reads))


def test_selection_leaves_no_host_read_in_lightnings_loop(tmp_path: Path) -> None:
    def during(scaler: Scaler) -> list[str]:
        with host_reads() as reads:
            loop = Loop(reads)
            trainer = make_trainer(scaler, [loop], tmp_path, gradient_clip_val=0.1)
            trainer.fit(Net("sgd"), data())
        assert len(loop.before) == BATCHES
        # The flag is read until the first step that is not skipped: that makes the optimizer's state.
        return reads[loop.before[BATCHES // 2] : loop.before[-1]]

    assert during(FUNCAMP["select"]("cpu", **NUMBERS)) == []
    assert len(during(Scaler("cpu", **NUMBERS))) == BATCHES // 2 - 1
