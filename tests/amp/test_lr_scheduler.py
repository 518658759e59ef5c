"""Schedules beside `GradScaler` that count applied steps. As beside torch's scaler they advance in any step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.float16_run import FUNCAMP, NUMBERS, OPTIMIZERS, SIZE, STEPS, make_data, make_model
from tests.support.helpers import assert_same, clone
from tests.support.host_reads import host_reads

pytestmark = pytest.mark.usefixtures("one_thread")


def batches() -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(part.split(SIZE) for part in make_data())))


def iterate(scaler: Any, model: Any, optimizer: Any, batch: tuple[Tensor, Tensor]) -> None:
    with torch.autocast("cpu", torch.float16):
        loss = torch.nn.functional.mse_loss(model(batch[0]).float(), batch[1])
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", FUNCAMP)
def test_a_schedule_counts_applied_steps_if_the_loop_reads_the_flag(name: str) -> None:
    model, taken = make_model(), 0
    scaler: Any = FUNCAMP[name](**NUMBERS)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for batch in batches():
        before = clone(list(model.parameters()))
        iterate(scaler, model, optimizer, batch)
        if scaler.metrics().found_inf == 0:
            schedule.step()
            taken += 1
        else:
            assert_same(clone(list(model.parameters())), before)
    assert 2 < schedule.last_epoch == taken < STEPS


def test_a_schedule_of_a_count_on_the_device_counts_applied_steps_and_reads_nothing() -> None:
    model, lr, taken = make_model(), torch.zeros(()), torch.zeros((), dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    scaler: Any = FUNCAMP["select"](**NUMBERS)
    with host_reads() as reads:
        for batch in batches():
            lr.copy_(1e-2 / (1 + taken))
            iterate(scaler, model, optimizer, batch)
            taken = torch.where(scaler.metrics().found_inf == 0, taken + 1, taken)
    assert reads == []
    assert 2 < taken < STEPS
    assert all(state["step"] == taken for state in optimizer.state.values())
