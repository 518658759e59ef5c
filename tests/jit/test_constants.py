"""Constants of a batch are compared by their type and `==`: unlike ones get a program each, equal ones share one."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import itertools
import pathlib
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


class OtherMode(enum.IntEnum):
    FIRST = 1


NUMBERS: list[tuple[Any, Any]] = [(2, 2.0), (1, True), (0.0, -0.0), (0j, -0j), (2, numpy.int64(2)), (1, Mode.FIRST)]
UNLIKE: dict[str, tuple[Any, Any]] = {
    **{f"leaf {a!r} {b!r}": (a, b) for a, b in NUMBERS},
    **{f"member {a!r} {b!r}": (frozenset([a]), frozenset([b])) for a, b in NUMBERS},
    "field": (Options(1), Options(2)),
    "string": ("a", Word("a")),
    "enumeration": (Mode.FIRST, OtherMode.FIRST),
    "partial": (Options(functools.partial(max, 2)), Options(functools.partial(max, 2))),
    "decimal": (decimal.Decimal("1"), decimal.Decimal("2")),
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
    "set": lambda: frozenset([1, 2.0, "a", (3,)]),
    "path": lambda: pathlib.PurePosixPath("a/b"),
    "decimal": lambda: decimal.Decimal("1.0"),
    "date": lambda: datetime.date(2000, 1, 1),
    "functions": lambda: Options((len, torch.sin, Options, [].append.__name__, str.upper)),
    "array's kind": lambda: numpy.dtype("float32"),
    "numpy number": lambda: numpy.float32(1),
    "enumeration": lambda: Options(Mode.FIRST),
    "generic class": lambda: Options(dict[str, int]),
}


@pytest.mark.parametrize("name", SAME)
def test_another_object_of_the_same_value_uses_the_same_program(name: str) -> None:
    assert programs([(torch.ones(1), SAME[name]()) for _ in range(3)]) == 1


@pytest.mark.parametrize("constant", [Options([1]), Options({"a": 1}), Options({1}), numpy.ones(2)])
def test_a_constant_that_cannot_be_hashed_is_refused(constant: Any) -> None:
    run = jit(lambda state, batch: (state, None), backend="eager")
    with pytest.raises(TypeError, match=r"jit: batch\[1\] must be a tensor, or a constant that can be hashed"):
        run({"a": torch.zeros(())}, (torch.ones(1), constant))
    assert run.programs == 0


def leaf() -> Any:
    return torch.ones(1)


STRUCTURES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "keys": (lambda: {2: leaf()}, lambda: {2.0: leaf()}),
    "keys True": (lambda: {1: leaf()}, lambda: {True: leaf()}),
    "keys zero": (lambda: {0.0: leaf()}, lambda: {-0.0: leaf()}),
    "key of a string class": (lambda: {"a": leaf()}, lambda: {Word("a"): leaf()}),
    "keys in tuples": (lambda: {(1, 2): leaf()}, lambda: {(1, 2.0): leaf()}),
    "inner keys": (lambda: [{2: leaf()}], lambda: [{2.0: leaf()}]),
    "keys beside a constant": (lambda: {2: leaf(), 3: 1}, lambda: {2.0: leaf(), 3: 1}),
    "keys of options": (lambda: {Options(1): leaf()}, lambda: {Options(2): leaf()}),
    "ordered": (lambda: collections.OrderedDict({2: leaf()}), lambda: collections.OrderedDict({2.0: leaf()})),
    "default": (lambda: collections.defaultdict(list, a=leaf()), lambda: collections.defaultdict(dict, a=leaf())),
    "named tuples": (lambda: Pair(leaf(), leaf()), lambda: OtherPair(leaf(), leaf())),
    "tuple and named tuple": (lambda: (leaf(), leaf()), lambda: Pair(leaf(), leaf())),
    "tuple and list": (lambda: (leaf(),), lambda: [leaf()]),
    "dict and ordered": (lambda: {"a": leaf()}, lambda: collections.OrderedDict({"a": leaf()})),
    "length of a queue": (lambda: collections.deque([leaf()]), lambda: collections.deque([leaf()], maxlen=4)),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_equal_structures_that_are_not_the_same_compile_again(name: str) -> None:
    one, other = STRUCTURES[name]
    assert programs([one(), other(), one(), other()]) == 2


def test_classes_of_one_name_are_two_structures() -> None:
    kinds = []
    for _ in range(2):

        class Batch:
            def __init__(self, x: Any) -> None:
                self.x = x

        torch.utils._pytree.register_pytree_node(Batch, lambda batch: ([batch.x], None), lambda x, _: None)
        kinds.append(Batch)
    assert programs([kinds[0](leaf()), kinds[1](leaf())]) == 2
