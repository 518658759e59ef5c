"""The schedules of transformers, each in one line, equal torch's loop to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from funcamp import schedule, stateless
from tests.support.schedules import APPLIED, all_of, assert_same_rows, funcamps_loop, rates, torchs_loop
from tests.support.trainers import imported

pytestmark = pytest.mark.models

#: Functions of transformers of each kind, and their arguments after the optimizer.
SCHEDULES: dict[str, dict[str, Any]] = {
    "get_constant_schedule_with_warmup": {"num_warmup_steps": 4},
    "get_cosine_with_hard_restarts_schedule_with_warmup": {
        "num_warmup_steps": 2,
        "num_training_steps": APPLIED,
        "num_cycles": 2,
    },
    "get_polynomial_decay_schedule_with_warmup": {"num_warmup_steps": 3, "num_training_steps": APPLIED, "power": 2.0},
    "get_wsd_schedule": {"num_warmup_steps": 3, "num_decay_steps": 4, "num_training_steps": APPLIED},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_of_transformers_equals_torchs_loop(name: str) -> None:
    function = getattr(imported("transformers"), name)

    def make(optimizer: torch.optim.Optimizer) -> Any:
        return function(optimizer, **SCHEDULES[name])

    expected = torchs_loop(all_of(torch.optim.AdamW, lr=0.03), make)
    assert len({rate for (rate,) in rates(expected)}) > 3
    scheduled = schedule(stateless(torch.optim.AdamW, lr=0.03), make, steps=APPLIED)
    assert_same_rows(funcamps_loop(scheduled), expected)
