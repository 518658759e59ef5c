"""Constants of a batch are compared by their type and `==`: unlike ones get a program each, equal ones share one."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from funcamp import jit


@dataclasses.dataclass(frozen=True)
class Options:
    n: Any


class Pair(NamedTuple):
    a: Any
    b: Any


class Mode(enum.IntEnum):
    FIRST = 1


X = torch.ones(1)
#: Two batches, and the number of programs for them. As in JAX, what is equal by a class's own `==` is one constant.
BATCHES: dict[str, tuple[Callable[[], Any], Callable[[], Any], int]] = {
    "an integer and a float": (lambda: 2, lambda: 2.0, 2),
    "two zeros": (lambda: 0.0, lambda: -0.0, 2),
    "an enum": (lambda: 1, lambda: Mode.FIRST, 2),
    "fields": (lambda: Options(1), lambda: Options(2), 2),
    "equal fields": (lambda: Options((1, None, "a", torch.half)), lambda: Options((1, None, "a", torch.half)), 1),
    "nan": (lambda: float("nan"), lambda: float("nan"), 1),
    "keys": (lambda: {2: X}, lambda: {2.0: X}, 2),
    "defaults": (lambda: collections.defaultdict(list, a=X), lambda: collections.defaultdict(dict, a=X), 2),
    "a tuple and a named tuple": (lambda: (X, X), lambda: Pair(X, X), 2),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_with_an_unlike_constant_or_structure_has_another_program(name: str) -> None:
    one, other, programs = BATCHES[name]
    run = jit(lambda state, batch: (state + 1, None), backend="eager")
    for make in (one, other, one, other):
        run(torch.zeros(()), {"x": X, "other": make()})
    assert run.programs == programs
