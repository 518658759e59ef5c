"""The Lightning module whose step is funcamp's: torch's loop, and Lightning's checkpoints, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

import funcamp
from tests.support.float16_run import assert_moves
from tests.support.helpers import assert_close, assert_same, clone
from tests.support.programs import import_example
from tests.support.quiet_lightning import IGNORED, trainer
from tests.support.steps import traced
from tests.support.torch_loop import AmpLoop

example = import_example("lightning_step", "examples/clients")

pytestmark = [*IGNORED, pytest.mark.usefixtures("one_thread")]

NUMBERS: dict[str, Any] = {"init_scale": 2.0**20, "growth_interval": 5}
STEPS = 16


def criterion(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), y)


class Recorder(pl.Callback):
    """The scale and the module's own parameters after every batch; a seed for every batch's dropout."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        torch.manual_seed(trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.rows.append((module.state.scaler.scale.item(), clone(dict(module.layers.named_parameters()))))


def fit(epochs: int, folder: Path, resume: Path | None = None) -> tuple[Any, Any, pl.Trainer]:
    torch.manual_seed(0)
    module, recorder = example.Net(funcamp.ScalerConfig(**NUMBERS), traced), Recorder()
    fitting = trainer(folder, max_epochs=epochs, callbacks=[recorder])
    fitting.fit(module, example.batches(STEPS), example.batches(1), ckpt_path=resume)
    return module, recorder.rows, fitting


def test_module_follows_torchs_loop(tmp_path: Path) -> None:
    _, rows, ended = fit(1, tmp_path)
    assert ended.global_step == STEPS
    torch.manual_seed(0)
    layers = example.Net().layers
    adamw = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    loop, expected = AmpLoop(layers, criterion, adamw, funcamp.ScalerConfig(**NUMBERS)), []
    for number, batch in enumerate(example.batches(STEPS)):
        torch.manual_seed(number)
        loop.step(batch, max_norm=1.0)
        expected.append((loop.scaler.get_scale(), clone(dict(layers.named_parameters()))))
    scales = [scale for scale, _ in expected]
    assert_moves(scales)
    assert [scale for scale, _ in rows] == scales
    assert_close([params for _, params in rows], [params for _, params in expected], 1e-3)


def test_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    _, whole, _ = fit(2, tmp_path)
    _, before, ended = fit(1, tmp_path)
    ended.save_checkpoint(tmp_path / "half.ckpt")
    module, after, _ = fit(2, tmp_path, tmp_path / "half.ckpt")
    assert_same([*before, *after], whole)
    assert module.state.step == 2 * STEPS


@pytest.mark.slow
def test_example_learns_and_its_validation_sees_the_trained_values(tmp_path: Path) -> None:
    numbers = example.main(200, str(tmp_path), traced)
    assert 5 < numbers["skipped"] < 20
    assert numbers["validation"] < 1.0  # 3.5 at first
    (file,) = tmp_path.rglob("*.ckpt")
    layers = example.Net().layers.eval()
    saved = torch.load(file, weights_only=True)["state_dict"]
    layers.load_state_dict({name.removeprefix("layers."): value for name, value in saved.items()})
    losses = []
    for x, y in example.batches(4):
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            losses.append(criterion(layers(x), y))
    assert numbers["validation"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-3)
