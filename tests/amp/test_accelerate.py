"""Hugging Face Accelerate with `GradScaler`: what its loop does with torch's scaler, bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import accelerate  # type: ignore[import-untyped]
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.support.accelerated import forget
from tests.support.float16_run import NUMBERS, OPTIMIZERS, SCALERS, SIZE, STEPS, assert_moves, make_data, make_model
from tests.support.helpers import assert_same, clone
from tests.support.programs import import_example

example = import_example("accelerate_loop")

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


class Run:
    """A model, its optimizer, data and schedule, prepared by Accelerate as on a GPU; `rows` of every step."""

    def __init__(self, scaler: Any, optimizer: str = "sgd", cls: Any = None) -> None:
        forget()
        make = cls or accelerate.Accelerator
        self.accelerator = make(mixed_precision="fp16", cpu=True)
        self.accelerator.native_amp = True  # on a CPU Accelerate accepts "fp16" and trains in float32
        self.accelerator.scaler = scaler
        model = make_model()
        inner = OPTIMIZERS[optimizer](model.parameters())
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model,
            inner,
            DataLoader(TensorDataset(*make_data()), batch_size=SIZE),
            torch.optim.lr_scheduler.ExponentialLR(inner, 0.9),
        )
        self.rows: list[dict[str, Any]] = []

    def train(self, first: int = 0, last: int = STEPS) -> Run:
        for x, y in itertools.islice(self.loader, first, last):
            self.accelerator.backward(torch.nn.functional.mse_loss(self.model(x), y))
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.rows.append(
                {
                    "skipped": bool(self.optimizer.step_was_skipped),
                    "scaler": self.accelerator.scaler.state_dict(),
                    "lr": self.schedule.get_last_lr(),
                    "params": clone(dict(self.model.named_parameters())),
                }
            )
        return self

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows]


def assert_same_run(actual: Run, expected: Run) -> None:
    assert_same(actual.rows, expected.rows)
    assert_same(actual.optimizer.state_dict(), expected.optimizer.state_dict())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_selection_with_the_examples_accelerator_equals_torch(optimizer: str) -> None:
    # not torch's fused run: Accelerate takes no step of it for skipped
    expected = Run(SCALERS["torch"](**NUMBERS), "adamw" if optimizer == "fused" else optimizer).train()
    assert_moves([row["scale"] for row in expected.column("scaler")])
    actual = Run(SCALERS["select"](**NUMBERS), optimizer, cls=example.Accelerator).train()
    for name in ("skipped", "scaler", "lr"):
        assert actual.column(name) == expected.column(name)
    if optimizer != "fused":
        assert_same_run(actual, expected)


MAKERS = {"torch": accelerate.Accelerator, "host": accelerate.Accelerator, "select": example.Accelerator}


@pytest.mark.parametrize(("first", "second"), list(itertools.product(MAKERS, repeat=2)))
def test_loaded_state_goes_on_as_the_uninterrupted_run(first: str, second: str, tmp_path: Path) -> None:
    half = 15  # in the middle of a growth interval
    whole = Run(SCALERS["torch"](**NUMBERS), "adamw").train()
    before = Run(SCALERS[first](**NUMBERS), "adamw", cls=MAKERS[first]).train(0, half)
    before.accelerator.save_state(str(tmp_path))
    assert whole.rows[half - 1]["scaler"]["_growth_tracker"] > 0
    after = Run(SCALERS[second](), "adamw", cls=MAKERS[second])  # the file's numbers count, not the constructor's
    after.accelerator.load_state(str(tmp_path))
    after.train(half, STEPS).rows[:0] = before.rows
    assert_same_run(after, whole)
