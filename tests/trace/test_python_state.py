"""Places in which Python keeps something from call to call: `jit` names what changed there."""

from __future__ import annotations

import array
import collections
import contextvars
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcamp import jit, make_train_step, module_loss, stateless
from funcamp._trace.python_state import Form, survey
from tests.support import python_counter

BATCH = (torch.linspace(-1, 1, 12).reshape(3, 4), torch.ones(3, 4))
SGD = stateless(torch.optim.SGD, lr=0.1)
Criterion = Callable[[Tensor, Tensor], Tensor]


def numbers() -> Iterator[int]:
    number = 1
    while True:
        yield number
        number += 1


class Totals:
    calls = itertools.count(1)
    total = 0

    @staticmethod
    def bump() -> int:
        Totals.total += 1
        return Totals.total


class Keeps:
    """A criterion that keeps what `make` returns, and weighs its loss with what `use` makes of it."""

    def __init__(self, make: Callable[[], Any], use: Callable[[Any], float]) -> None:
        self.kept, self.use = make(), use

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) * self.use(self.kept)


def written(kept: Any) -> float:
    kept[0] += 1
    return float(kept[0])


def counted(kept: Any) -> float:
    kept["n"] = kept.get("n", 0) + 1
    return float(kept["n"])


def moved(kept: Any) -> float:
    key = next(iter(kept))
    kept[key] = kept.pop(key)
    return float(next(iter(kept.values())))


def rotated(kept: Any) -> float:
    kept.rotate(1)
    return float(kept[0].factor)


def set_variable(kept: Any) -> float:
    kept.set(kept.get() + 1)
    return float(kept.get())


def swapped(kept: Any) -> float:
    factor = float(kept.act(1.0))
    kept.act = triple
    return factor


def exchanged(kept: Any) -> float:
    kept.one, kept.two = kept.two, kept.one
    return float(kept.one.factor)


def double(x: float) -> float:
    return 2 * x


def triple(x: float) -> float:
    return 3 * x


def factor(value: float) -> types.SimpleNamespace:
    return types.SimpleNamespace(factor=value)


def in_an_inner_function(_: Any) -> float:
    return sum(python_counter.bump() for _ in range(1))


def in_a_module(_: Any) -> float:
    python_counter.count += 1
    return float(python_counter.count)


def in_a_class(_: Any) -> float:
    Totals.total += 1
    return float(Totals.total)


KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], float], str]] = {
    "variable of a module": (lambda: None, in_a_module, r"criterion.use.python_counter.count changed from 0 to 1"),
    "function of a module": (lambda: None, lambda _: python_counter.bump(), r"count changed from 0 to 1"),
    "iterator of a module": (lambda: None, lambda _: next(python_counter.calls), r"calls \(an iterator\) changed"),
    "inner function": (lambda: None, in_an_inner_function, r"count changed from 0 to 1"),
    "class as a global": (lambda: None, in_a_class, r"criterion.use.Totals.total changed from 0 to 1"),
    "static method": (lambda: None, lambda _: Totals.bump(), r"total changed from 0 to 1"),
    "iterator of a class": (lambda: None, lambda _: next(Totals.calls), r"calls \(an iterator\) changed"),
    "list iterator": (lambda: iter([1.0, 2.0, 3.0, 4.0]), next, r"kept \(an iterator\) changed from .*4 left"),
    "chain": (lambda: itertools.chain([1.0, 2.0], [3.0, 4.0]), next, r"kept \(an iterator\).* changed"),
    "cycle": (lambda: itertools.cycle([1.0, 2.0, 3.0]), next, r"kept \(an iterator\).* changed"),
    "zip": (lambda: zip([1.0, 2.0, 3.0, 4.0]), lambda kept: float(next(kept)[0]), r"kept \(an iterator\).* changed"),
    "generator": (numbers, next, r"kept \(a generator\).* changed"),
    "UserDict": (lambda: collections.UserDict(n=0), counted, r"kept.data\['n'\] changed from 0 to 1"),
    "ChainMap": (lambda: collections.ChainMap({"n": 0}), counted, r"kept.maps\[0\]\['n'\] changed from 0 to 1"),
    "Counter": (collections.Counter, counted, r"kept.* changed from"),
    "order of a dict": (lambda: {"a": 1.0, "b": 2.0}, moved, r"the keys of criterion.kept changed"),
    "order of an OrderedDict": (lambda: collections.OrderedDict(a=1.0, b=2.0), moved, r"the keys of criterion.kept"),
    "order of a deque": (lambda: collections.deque([factor(1.0), factor(2.0)]), rotated, r"kept\[[01]\].* changed"),
    "context variable": (
        lambda: contextvars.ContextVar("kept", default=0),
        set_variable,
        r"kept \(a context variable\) changed from 0 to 1",
    ),
    "numpy array": (lambda: np.zeros(3), written, r"criterion.kept changed"),
    "bytearray": (lambda: bytearray(3), written, r"criterion.kept changed"),
    "array": (lambda: array.array("d", [0.0]), written, r"criterion.kept changed"),
    "function": (lambda: types.SimpleNamespace(act=double), swapped, r"kept.act changed from .*double.* to .*triple"),
    "objects": (
        lambda: types.SimpleNamespace(one=factor(1.0), two=factor(2.0)),
        exchanged,
        r"kept.(one|two).* changed",
    ),
}


def in_torch(criterion: Criterion, model: nn.Module) -> list[Tensor]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = criterion(model(BATCH[0]), BATCH[1])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def reset() -> None:
    python_counter.count = Totals.total = 0
    python_counter.calls = Totals.calls = itertools.count(1)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("name", KEPT)
def test_what_changes_in_python_is_named(name: str) -> None:
    make, use, message = KEPT[name]
    reset()
    expected = in_torch(Keeps(make, use), linear())
    assert expected[0] != expected[1]
    reset()
    step = make_train_step(module_loss(linear(), Keeps(make, use)), SGD)
    state = step.init()
    with pytest.raises(RuntimeError, match=rf"jit: step must not keep an? \w+ in Python from call to call.*{message}"):
        jit(step, backend="eager")(state, BATCH)


def test_the_training_flag_that_the_forward_pass_changes_is_named() -> None:
    class Flips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.drop(self.layer(x))
            self.drop.eval()
            return out

    step = make_train_step(module_loss(Flips(), F.mse_loss), SGD)
    with pytest.raises(RuntimeError, match=r"model.drop.training changed from True to False in the first call"):
        jit(step, backend="eager")(step.init(), BATCH)


def test_a_variable_of_a_hooks_closure_is_named() -> None:
    model, calls = nn.Linear(4, 4), 0

    def hook(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        return given[-1] * calls

    model.register_forward_hook(hook)
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    with pytest.raises(RuntimeError, match=r"hooks.*\.calls changed from 0 to 1 in the first call"):
        jit(step, backend="eager")(step.init(), BATCH)


def test_what_is_made_anew_in_each_call_is_no_change(caplog: pytest.LogCaptureFixture) -> None:
    class Output:
        def __init__(self, value: Tensor) -> None:
            self.value, self.size, self.functions = value, 3, [lambda: value]

    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.last = Output(torch.zeros(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x)
            self.last = Output(out.detach())
            return out

    step = make_train_step(module_loss(Makes(), F.mse_loss), SGD)
    with caplog.at_level("WARNING", "funcamp"):
        jit(step, backend="eager")(step.init(), BATCH)
    # The module keeps its output, which may be logged; no value is reported that changed.
    others = [message for message in caplog.messages if not message.startswith("jit: Python keeps tensors of the step")]
    assert others == []


def test_modules_of_libraries_are_not_walked() -> None:
    def criterion(out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) * float(np.float64(1.0))

    assert {path.count(".") for path in survey({"criterion": criterion})} <= {0, 1}


def test_a_container_that_computes_its_contents_is_not_asked_for_them() -> None:
    class Lazy(dict[str, Any]):
        """A mapping as that of transformers' classes: to go through it imports all of them."""

        def _import(self, *_: Any) -> Any:
            raise AssertionError("it was asked")

        __iter__ = __getitem__ = __len__ = keys = values = items = _import

    table = Lazy()
    dict.__setitem__(table, "kept", 1)
    found = survey({"table": table})
    assert found["table['kept']"].now() == 1
    assert Form(table).difference("table", Form(table)) is None


@torch.fx.wrap
def doubled(x: Tensor) -> Tensor:
    return 2 * x


class Wrapping(nn.Module):
    """A function of torch.fx.wrap, as timm has them: torch replaces it in this file while it traces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.called = nn.Linear(4, 1), 0

    def forward(self, x: Tensor) -> Tensor:
        self.called += 1
        return doubled(self.linear(x))


def test_a_function_that_torch_wraps_while_it_traces_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    step = make_train_step(module_loss(Wrapping(), nn.functional.mse_loss), stateless(torch.optim.SGD))
    with caplog.at_level("WARNING", "funcamp"):
        jit(step, backend="eager")(step.init(), (torch.ones(2, 4), torch.zeros(2, 1)))
    (message,) = caplog.messages
    assert "model.called" in message
    assert "doubled" not in message
