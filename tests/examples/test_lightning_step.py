"""The Lightning module whose step is funcamp's: torch's loop, and Lightning's checkpoints, bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

import funcamp
from tests.support.helpers import assert_close, assert_same, clone
from tests.support.programs import import_example
from tests.support.steps import traced

example = import_example("lightning_step", "examples/clients")

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Lightning's own use of a deprecated part of torch 2.13's pytree.
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning"),
    # The data is in memory: worker processes would cost more than they bring.
    pytest.mark.filterwarnings("ignore:The '[a-z_]+' does not have many workers:UserWarning"),
]

NUMBERS: dict[str, Any] = {"init_scale": 2.0**20, "growth_interval": 5}
STEPS = 16


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
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, example.batches(STEPS), example.batches(1), ckpt_path=resume)
    return module, recorder.rows, trainer


def test_module_follows_torchs_loop(tmp_path: Path) -> None:
    _, rows, trainer = fit(1, tmp_path)
    assert trainer.global_step == STEPS
    torch.manual_seed(0)
    layers = example.Net().layers
    adamw, scaler = torch.optim.AdamW(layers.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", **NUMBERS)
    expected = []
    for number, (x, y) in enumerate(example.batches(STEPS)):
        torch.manual_seed(number)
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(layers(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(adamw)
        nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
        scaler.step(adamw)
        scaler.update()
        adamw.zero_grad()
        expected.append((scaler.get_scale(), clone(dict(layers.named_parameters()))))
    scales = [scale for scale, _ in expected]
    assert any(b < a for a, b in itertools.pairwise(scales))
    assert any(b > a for a, b in itertools.pairwise(scales))
    assert [scale for scale, _ in rows] == scales
    assert_close([params for _, params in rows], [params for _, params in expected], 1e-3)


def test_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    _, whole, _ = fit(2, tmp_path)
    _, before, trainer = fit(1, tmp_path)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
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
            losses.append(nn.functional.mse_loss(layers(x).float(), y))
    assert numbers["validation"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-3)
