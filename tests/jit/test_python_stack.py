"""A first call has a large piece of Python's stack, however deep its caller is."""

from __future__ import annotations

import resource
import threading
from typing import Any

import torch
from torch import Tensor

from funcamp import jit

CALLS = 200


def called(*_: object, a: int = 0, b: int = 0, c: int = 0, d: int = 0, e: int = 0, f: int = 0) -> None:
    """Have more values than `faults_at`: then the end of a piece is between the two at some depths."""


def faults_at(depth: int) -> int:
    """Return how often memory was touched first in a loop of calls at a depth."""
    if depth:
        return faults_at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        called()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_no_depth_makes_each_call_get_memory() -> None:
    found: list[int] = []

    def step(state: Any, batch: Tensor) -> Any:
        found.extend(map(faults_at, range(400)))
        return state, batch.sum()

    # In a thread of its own: a test has a large piece already.
    run = jit(step, backend="eager")
    thread = threading.Thread(target=run, args=({"w": torch.ones(())}, torch.ones(2)))
    thread.start()
    thread.join()
    assert len(found) == 400
    assert max(found) < CALLS // 2
