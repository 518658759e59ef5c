"""Constants that compare as equal and are not the same get a program each; the same ones share one."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import pathlib
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from funcamp import jit


@dataclasses.dataclass(frozen=True)
class Options:
    n: Any
    mode: Any = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True)
class Cached:
    n: Any

    @functools.cached_property
    def doubled(self) -> Any:
        return self.n * 2


class Slots:
    __slots__ = ("n",)

    def __init__(self, n: Any) -> None:
        self.n = n

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slots)

    def __hash__(self) -> int:
        return 0


class Plain:
    def __init__(self, n: Any) -> None:
        self.n = n


class Word(str):
    unit: Any


class Number(float):
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


def with_unit(kind: Any, value: Any, unit: Any) -> Any:
    made = kind(value)
    made.unit = unit
    return made


def cyclic(n: Any) -> Options:
    inner = Plain(n)
    inner.again = inner  # type: ignore[attr-defined]
    return Options(1, inner)


NUMBERS: list[tuple[Any, Any]] = [(2, 2.0), (1, True), (0.0, -0.0), (0j, -0j), (2, numpy.int64(2)), (1, Mode.FIRST)]
UNLIKE: dict[str, tuple[Any, Any]] = {
    **{f"field {a!r} {b!r}": (Options(a), Options(b)) for a, b in NUMBERS},
    **{f"member {a!r} {b!r}": (frozenset([a]), frozenset([b])) for a, b in NUMBERS},
    **{f"leaf {a!r} {b!r}": (a, b) for a, b in NUMBERS},
    "not compared": (Options(1, "one"), Options(1, "two")),
    "tuple in a field": (Options((1, (2,))), Options((1, (2.0,)))),
    "dict in a field that is not compared": (Options(1, {"a": 1}), Options(1, {"a": True})),
    "keys in such a dict": (Options(1, {1: 1}), Options(1, {1.0: 1})),
    "order of such a dict": (Options(1, {1: 1, 2: 2}), Options(1, {2: 2, 1: 1})),
    "nested": (Options(Options(2)), Options(Options(2.0))),
    "object in a field": (Options(1, Plain(2)), Options(1, Plain(2.0))),
    "slots": (Slots(1), Slots(2)),
    "array in a field": (Options(1, numpy.zeros(2)), Options(1, numpy.ones(2))),
    "string class": (with_unit(Word, "a", 1), with_unit(Word, "a", 2)),
    "string": ("a", Word("a")),
    "number class": (with_unit(Number, 1, 1), with_unit(Number, 1, 2)),
    "enumeration": (Mode.FIRST, OtherMode.FIRST),
    "range": (range(0), range(1, 1)),
    "slice in a field": (Options(1, slice(1)), Options(1, slice(1.0))),
    "decimal": (decimal.Decimal("1"), decimal.Decimal("1.0")),
    "partial": (Options(functools.partial(max, 2)), Options(functools.partial(max, 2.0))),
    "named tuple in a field": (Options(Pair(1)), Options(OtherPair(1))),
    "time zones": (
        datetime.datetime(2000, 1, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1))),
        datetime.datetime(2000, 1, 1, 0, tzinfo=datetime.timezone.utc),
    ),
    "object that contains itself": (cyclic(1), cyclic(2)),
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


def test_the_program_of_such_a_constant_is_its_own() -> None:
    run = jit(lambda state, batch: ({"a": state["a"] + 1}, batch[0] // batch[1].n), backend="eager")
    state: Any = {"a": torch.zeros(())}
    for n, dtype in ((2, torch.int64), (2.0, torch.float32), (2, torch.int64)):
        state, found = run(state, (torch.tensor([3]), Options(n)))
        assert found.dtype == dtype


SAME: dict[str, Callable[[], Any]] = {
    "dataclass": lambda: Options((1, 2.0, None, "a", b"b", torch.float16), {"x": [1, {2, 3}]}),
    "slots": lambda: Slots(1),
    "not a number": lambda: Options(float("nan")),
    "nan": lambda: float("nan"),
    "set": lambda: frozenset([1, 2.0, "a", (3,)]),
    "path": lambda: pathlib.PurePosixPath("a/b"),
    "decimal": lambda: decimal.Decimal("1.0"),
    "date": lambda: datetime.date(2000, 1, 1),
    "functions": lambda: Options(len, (torch.sin, Options, [].append.__name__, str.upper)),
    "array": lambda: Options(1, numpy.ones(3)),
    "array's kind": lambda: numpy.dtype("float32"),
    "numpy number": lambda: numpy.float32(1),
    "enumeration": lambda: Options(Mode.FIRST),
    "object that contains itself": lambda: cyclic(1),
    "generic class": lambda: Options(dict[str, int]),
    "large": lambda: Options(tuple(range(20_000))),
}


@pytest.mark.parametrize("name", SAME)
def test_another_object_of_the_same_value_uses_the_same_program(name: str) -> None:
    assert programs([(torch.ones(1), SAME[name]()) for _ in range(3)]) == 1


def test_a_property_that_is_computed_once_is_no_part_of_a_constant() -> None:
    seen = []

    def step(state: Any, batch: Any) -> Any:
        seen.append(batch[1].doubled)
        return state, None

    run, state, constant = jit(step, backend="eager"), {"a": torch.zeros(())}, Cached(2)
    for _ in range(3):
        state, _ = run(state, (torch.ones(1), constant))
    assert (set(seen), run.programs) == ({4}, 1)


def test_a_part_that_was_changed_in_place_compiles_again() -> None:
    inner = Plain(1)
    run = jit(lambda state, batch: (state, batch[0] * batch[1].mode.n), backend="eager")
    state: Any = {"a": torch.zeros(())}
    for n in (1, 2):
        inner.n = n
        assert run(state, (torch.ones(1), Options(1, inner)))[1].item() == n


def nested(inner: Any, depth: int) -> Any:
    return Options(1, nested(inner, depth - 1)) if depth else inner


class Shown:
    """Equal to any other, and without parts that anyone could see."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shown)

    def __hash__(self) -> int:
        return 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot be pickled")


@pytest.mark.parametrize(
    ("constant", "part"),
    [
        (Options(1, threading.Lock()), "lock"),
        (Shown(), "Shown"),
        (Options(1, tuple((number, ()) for number in range(20_000))), "too many parts"),
        (nested(torch.ones(1), 9), "torch.float32 tensor"),
    ],
    ids=["lock", "opaque", "large", "deep tensor"],
)
def test_a_constant_that_cannot_be_described_is_refused(constant: Any, part: str) -> None:
    run = jit(lambda state, batch: (state, None), backend="eager")
    for _ in range(2):
        with pytest.raises(TypeError, match=rf"jit: batch\[1\] must be .*{part}.*: pass a dict"):
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
    "keys of options": (lambda: {Options(1, 1): leaf()}, lambda: {Options(1, 2): leaf()}),
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
