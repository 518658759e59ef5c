"""A program has the number of threads for which it was compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import jit
from tests.support.helpers import assert_same


@pytest.mark.inductor
def test_another_number_of_threads_changes_no_number() -> None:
    """Generated sums have as many parts as there were threads."""

    def step(state: Any, batch: Tensor) -> Any:
        return state, batch.sin().sum()

    threads, run, batch = torch.get_num_threads(), jit(step), torch.randn(4096, 64)
    try:
        torch.set_num_threads(2)
        state, expected = run({"w": torch.ones(())}, batch)
        for other in (1, 3, 8):
            torch.set_num_threads(other)
            state, found = run(state, batch)
            assert_same(found, expected)
    finally:
        torch.set_num_threads(threads)
