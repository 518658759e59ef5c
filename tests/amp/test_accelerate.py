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
from tests.support.float16_run import NUMBERS, OPTIMIZERS, SCALERS, SIZE, STEPS, make_data, make_model
from tests.support.helpers import assert_same, clone
from tests.support.programs import import_example

example = import_example("accelerate_loop")

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


class Run:
    """A model, its optimizer, data and schedule, prepared by Accelerate as on a GPU; `rows` of every step."""

    def __init__(self, scaler: Any, cls: Any = None) -> None:
        forget()
        make = cls or accelerate.Accelerator
        self.accelerator = make(mixed_precision="fp16", cpu=True)
        self.accelerator.native_amp = True  # on a CPU Accelerate accepts "fp16" and trains in float32
        self.accelerator.scaler = scaler
        model = make_model()
        inner = OPTIMIZERS["adamw"](model.parameters())
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


def assert_same_run(actual: Run, expected: Run) -> None:
    assert_same(actual.rows, expected.rows)
    assert_same(actual.optimizer.state_dict(), expected.optimizer.state_dict())


MAKERS = {"torch": accelerate.Accelerator, "host": accelerate.Accelerator, "select": example.Accelerator}


@pytest.mark.parametrize(("first", "second"), list(itertools.product(MAKERS, repeat=2)))
def test_loaded_state_goes_on_as_the_uninterrupted_run(first: str, second: str, tmp_path: Path) -> None:
    half = 15  # in the middle of a growth interval
    whole = Run(SCALERS["torch"](**NUMBERS)).train()
    before = Run(SCALERS[first](**NUMBERS), cls=MAKERS[first]).train(0, half)
    before.accelerator.save_state(str(tmp_path))
    assert whole.rows[half - 1]["scaler"]["_growth_tracker"] > 0
    after = Run(SCALERS[second](), cls=MAKERS[second])  # the file's numbers count, not the constructor's
    after.accelerator.load_state(str(tmp_path))
    after.train(half, STEPS).rows[:0] = before.rows
    assert_same_run(after, whole)
