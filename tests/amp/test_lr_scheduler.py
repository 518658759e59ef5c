"""A schedule beside `GradScaler` that counts applied steps on the device. Schedulers of torch advance in any step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.float16_run import FUNCAMP, NUMBERS, SIZE, STEPS, make_data, make_model
from tests.support.host_reads import host_reads

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_schedule_of_a_count_on_the_device_counts_applied_steps_and_reads_nothing() -> None:
    model, lr, taken = make_model(), torch.zeros(()), torch.zeros((), dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    scaler: Any = FUNCAMP["select"](**NUMBERS)
    with host_reads() as reads:
        for x, y in zip(*(part.split(SIZE) for part in make_data())):
            lr.copy_(1e-2 / (1 + taken))
            with torch.autocast("cpu", torch.float16):
                loss = torch.nn.functional.mse_loss(model(x).float(), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            taken = torch.where(scaler.metrics().found_inf == 0, taken + 1, taken)
    assert reads == []
    assert 2 < taken < STEPS
    assert all(state["step"] == taken for state in optimizer.state.values())
