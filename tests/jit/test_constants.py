"""Constants of a batch are compared by their type and `==`: unlike ones get a program each, equal ones share one."""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from funcamp import jit


@dataclasses.dataclass(frozen=True)
class Options:
    n: Any


class Word(str):
    unit: Any


class Pair(NamedTuple):
    a: Any
    b: Any = 0


class OtherPair(NamedTuple):
    a: Any
    b: Any = 0


class Mode(enum.IntEnum):
    FIRST = 1


NUMBERS: list[tuple[Any, Any]] = [(2, 2.0), (1, True), (0.0, -0.0), (0j, -0j), (2, numpy.int64(2)), (1, Mode.FIRST)]
UNLIKE: dict[str, tuple[Any, Any]] = {
    **{f"leaf {a!r} {b!r}": (a, b) for a, b in NUMBERS},
    **{f"member {a!r} {b!r}": (frozenset([a]), frozenset([b])) for a, b in NUMBERS},
    "field": (Options(1), Options(2)),
}


def programs(batches: list[Any]) -> int:
    """The number of programs for them; each call must see its own batch."""
    run = jit(lambda state, batch: ({"a": state["a"] + 1}, None), backend="eager")
    state: Any = {"a": torch.zeros(())}
    for batch in batches:
        state, _ = run(state, batch)
    return run.programs


@pytest.mark.parametrize("name", UNLIKE)
def test_equal_constants_that_are_not_the_same_compile_again(name: str) -> None:
    one, other = UNLIKE[name]
    assert programs([(torch.ones(1), one), (torch.ones(1), other), (torch.ones(1), one)]) == 2


#: As in JAX, what is equal by a class's own `==` is one constant, also 2 and 2.0 in a field.
SAME: dict[str, Callable[[], Any]] = {
    "dataclass": lambda: Options((1, 2.0, None, "a", b"b", torch.float16)),
    "field of another type": itertools.cycle([Options(2), Options(2.0)]).__next__,
    "nan": lambda: float("nan"),
}


@pytest.mark.parametrize("name", SAME)
def test_another_object_of_the_same_value_uses_the_same_program(name: str) -> None:
    assert programs([(torch.ones(1), SAME[name]()) for _ in range(3)]) == 1


def leaf() -> Any:
    return torch.ones(1)


STRUCTURES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "keys": (lambda: {2: leaf()}, lambda: {2.0: leaf()}),
    "key of a string class": (lambda: {"a": leaf()}, lambda: {Word("a"): leaf()}),
    "default": (lambda: collections.defaultdict(list, a=leaf()), lambda: collections.defaultdict(dict, a=leaf())),
    "named tuples": (lambda: Pair(leaf(), leaf()), lambda: OtherPair(leaf(), leaf())),
    "tuple and named tuple": (lambda: (leaf(), leaf()), lambda: Pair(leaf(), leaf())),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_equal_structures_that_are_not_the_same_compile_again(name: str) -> None:
    one, other = STRUCTURES[name]
    assert programs([one(), other(), one(), other()]) == 2
