"""State that a step's Python keeps from call to call: torch's loop, an eager step and a jitted step give the same."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcamp import jit, make_train_step, module_loss, stateless
from tests.support.helpers import assert_same

SGD = stateless(torch.optim.SGD, lr=0.1)


def mean(out: Tensor) -> Tensor:
    return out.detach().mean(0, keepdim=True)


class Hidden(NamedTuple):
    first: Tensor
    second: Tensor


class Recurrent(nn.Module):
    """Keeps its state from step to step in an attribute: a tensor, a pair, a named tuple, a dict or a list."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.cell, self.head = how, nn.LSTMCell(4, 4), nn.Linear(4, 1)
        zeros = torch.zeros(5, 4)
        self.state: Any = self.packed(zeros, zeros)  # both the same tensor

    def packed(self, h: Tensor, c: Tensor) -> Any:
        kinds: dict[str, Callable[[], Any]] = {
            "pair": lambda: (h, c),
            "named tuple": lambda: Hidden(h, c),
            "list": lambda: [h, c],
            "namespace": lambda: types.SimpleNamespace(h=h, c=c),
        }
        return kinds[self.how]()

    def forward(self, x: Tensor) -> Tensor:
        held = self.state
        h, c = (held.h, held.c) if self.how == "namespace" else held
        h, c = self.cell(x, (h, c))
        self.state = self.packed(h.detach(), c.detach())
        out: Tensor = self.head(h)
        return out


class Center:
    """A criterion that keeps a running mean."""

    def __init__(self) -> None:
        self.center = torch.zeros(1, 1)

    def __call__(self, out: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(out - self.center, target)
        self.center = self.center * 0.9 + mean(out) * 0.1
        return loss

    def method(self, out: Tensor, target: Tensor) -> Tensor:
        return self(out, target)


class ModuleCenter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, 1))

    forward = Center.__call__


def closure() -> Callable[[Tensor, Tensor], Tensor]:
    center = torch.zeros(1, 1)

    def criterion(out: Tensor, target: Tensor) -> Tensor:
        nonlocal center
        loss = F.mse_loss(out - center, target)
        center = center * 0.9 + mean(out) * 0.1
        return loss

    return criterion


def partial() -> Callable[[Tensor, Tensor], Tensor]:
    def criterion(held: dict[str, Tensor], out: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(out - held["center"], target)
        held["center"] = held["center"] * 0.9 + mean(out) * 0.1
        return loss

    return functools.partial(criterion, {"center": torch.zeros(1, 1)})


def last_two() -> Callable[[Tensor, Tensor], Tensor]:
    held = collections.deque([torch.zeros(1, 1), torch.ones(1, 1)], maxlen=2)

    def criterion(out: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(out - held[0] - 0.5 * held[1], target)
        held.append(mean(out))
        return loss

    return criterion


CRITERIA: dict[str, Callable[[], Any]] = {
    "object": Center,
    "bound method": lambda: Center().method,
    "module's buffer": ModuleCenter,
    "closure": closure,
    "partial": partial,
    "deque": last_two,
    "lambda around": lambda: (lambda criterion: lambda out, target: criterion(out, target))(Center()),
}
BATCHES = [(torch.randn(5, 4, generator=torch.Generator().manual_seed(n)), torch.ones(5, 1)) for n in range(4)]


def trained(model: nn.Module, criterion: Any, between: Callable[[int], None] = lambda _: None) -> list[Tensor]:
    """Return the losses of torch's loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number, (x, y) in enumerate(BATCHES):
        between(number)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def stepped(
    model: nn.Module, criterion: Any, compiled: bool, between: Callable[[int], None] = lambda _: None
) -> list[Tensor]:
    step = make_train_step(module_loss(model, criterion), SGD)
    run: Any = jit(step, backend="eager") if compiled else step
    state, losses = step.init(), []
    for number, batch in enumerate(BATCHES):
        between(number)
        state, metrics = run(state, batch)
        losses.append(metrics.loss)
    return losses


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", CRITERIA)
def test_a_criterion_with_state(name: str, compiled: bool) -> None:
    make = CRITERIA[name]
    assert_same(stepped(linear(), make(), compiled), trained(linear(), make()))


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("how", ["pair", "named tuple", "list", "namespace"])
def test_a_model_with_state(how: str, compiled: bool) -> None:
    torch.manual_seed(0)
    expected = trained(Recurrent(how), F.mse_loss)
    torch.manual_seed(0)
    model = Recurrent(how)
    kind = type(model.state)
    assert_same(stepped(model, F.mse_loss, compiled), expected)
    assert type(model.state) is kind


@pytest.mark.compiled
def test_state_that_is_reset_between_calls_of_jit() -> None:
    runs = []
    for train in (trained, functools.partial(stepped, compiled=True)):
        criterion, start = Center(), torch.zeros(1, 1)
        criterion.center = start

        def between(number: int, criterion: Any = criterion, start: Tensor = start) -> None:
            if number == 2:
                criterion.center = start

        runs.append(train(linear(), criterion, between=between))
        assert_same(start, torch.zeros(1, 1))
    assert_same(runs[1], runs[0])


@pytest.mark.compiled
def test_state_of_another_shape_between_calls_of_jit_is_refused() -> None:
    criterion = Center()

    def between(number: int) -> None:
        if number == 2:
            criterion.center = torch.zeros(5, 1)

    with pytest.raises(RuntimeError, match=r"jit: criterion.center must keep its structure, shape, dtype and device"):
        stepped(linear(), criterion, True, between)


class Counter:
    """A criterion whose weight follows from a number that counts calls."""

    total = 0

    def __init__(self, how: str) -> None:
        self.how, self.n, self.seen, self.count = how, 0, [0], itertools.count()
        self.on = False
        self.last: Tensor | None = None

    def __call__(self, out: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(out, target)
        if self.how == "attribute":
            self.n += 1
            return loss * self.n
        if self.how == "class":
            type(self).total += 1
            return loss * type(self).total
        if self.how == "list":
            self.seen.append(1)
            return loss * len(self.seen)
        if self.how == "iterator":
            return loss * (1 + next(self.count))
        if self.how == "flag":
            factor = 2.0 if self.on else 1.0
            self.on = True
            return loss * factor
        if self.last is not None:
            loss = loss + (out - self.last).square().mean()
        self.last = mean(out)
        return loss


NAMES = {
    "attribute": r"criterion\.n changed from 0 to 1",
    "class": r"criterion\.total changed from 0 to 1",
    "list": r"len\(criterion\.seen\) changed from 1 to 2",
    "iterator": r"criterion\.count \(an iterator\) changed from .*count\(0\).* to 'count\(1\)'",
    "flag": r"criterion\.on changed from False to True",
    "none before": r"criterion\.last is a torch.float32 tensor of shape \(1, 1\)",
}


@pytest.mark.parametrize("factor_later", [1.0, 0.5])
def test_a_count_without_effect_in_two_calls_is_said_and_not_refused(
    factor_later: float, caplog: pytest.LogCaptureFixture
) -> None:
    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 1), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            out: Tensor = self.layer(x) * (1.0 if self.calls < 4 else factor_later)
            return out

    step = make_train_step(module_loss(Logs(), F.mse_loss), stateless(torch.optim.SGD))
    jit(step, backend="eager")(step.init(), (torch.ones(2, 4), torch.ones(2, 1)))
    assert "later calls will not: model.calls (from 0 to 1)" in caplog.text


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("how", NAMES)
def test_a_number_that_python_counts_is_refused_under_jit(how: str) -> None:
    Counter.total = 0
    expected = trained(linear(), Counter(how))
    Counter.total = 0
    assert_same(stepped(linear(), Counter(how), False), expected)
    Counter.total = 0
    with pytest.raises(RuntimeError, match=rf"jit: step must not keep a .* call to call.*{NAMES[how]}"):
        stepped(linear(), Counter(how), True)
    assert Counter.total == 0


class Caches(nn.Module):
    """What libraries keep at the first call: a table by size, a flag, the last length, the last attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("frequencies", torch.arange(4.0))
        self.tables: dict[int, Tensor] = {}
        self.rotary: Tensor | None = None
        self.frequencies: Tensor
        self.warned, self.longest, self.attention = False, 0, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[0]
        if size not in self.tables:
            self.tables[size] = torch.arange(float(size))[:, None]
        if self.rotary is None:
            self.rotary = self.frequencies.cos()
        self.warned = True
        self.longest = max(size, self.longest)
        out: Tensor = self.linear(x * self.rotary) + self.tables[size]
        self.attention = out.detach().softmax(0)
        return out


@pytest.mark.compiled
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_what_is_kept_once_is_no_state(compiled: bool) -> None:
    torch.manual_seed(0)
    expected = trained(Caches(), F.mse_loss)
    torch.manual_seed(0)
    assert_same(stepped(Caches(), F.mse_loss, compiled), expected)


class Anchored(nn.Module):
    """Keeps a tensor of its first call and reads it in later ones."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer, self.norm = how, nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.first: Tensor | None = None
        self.saved: dict[str, Tensor] = {}
        self.of = functools.lru_cache(lambda name: self.get_parameter(name).detach().clone())

    @functools.cached_property
    def property(self) -> Tensor:
        return self.layer.weight.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layer(x))
        if self.how == "attribute":
            if self.first is None:
                self.first = self.layer.weight.detach() * 2
            start = self.first / 2
        elif self.how == "buffer":
            if self.first is None:
                assert self.norm.running_mean is not None
                self.first = self.norm.running_mean.clone()
            return out + 0.1 * self.first
        elif self.how == "cached_property":
            start = self.property
        elif self.how == "dict":
            start = self.saved.setdefault("start", self.layer.weight.detach().clone())
        else:
            start = self.of("layer.weight")
        return out + (self.layer.weight - start).square().sum()


ANCHORS = {
    "attribute": r"model\.first is",
    "buffer": r"model\.first is",
    "cached_property": r"model\.property is",
    "dict": r"model\.saved\['start'\] is",
    "lru_cache": r"a variable or a function's cache is",
}


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("how", ANCHORS)
def test_a_tensor_that_is_kept_of_a_changing_part_of_the_state_is_refused_under_jit(how: str, donate: bool) -> None:
    torch.manual_seed(0)
    model = Anchored(how)
    copied = copy.deepcopy(model) if how != "lru_cache" else None
    step = make_train_step(module_loss(model, square), SGD)
    if copied is not None:
        assert_same(stepped(copied, square, False), trained(copy.deepcopy(model), square))
    message = (
        rf"must not keep a tensor in Python from call to call.*a part of the state.*{ANCHORS[how]} a torch.float32"
    )
    with pytest.raises(RuntimeError, match=message):
        jit(step, backend="eager", donate=donate)(step.init(), BATCHES[0])


def square(out: Tensor, y: Tensor) -> Tensor:
    return out.square().mean()


class Rotary(nn.Module):
    """Makes tables of a buffer that no step changes, at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("frequencies", torch.arange(4.0))
        self.frequencies: Tensor
        self.table: Tensor | None = None
        self.like: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.outer(torch.arange(4.0), self.frequencies).cos().to(x.dtype)
            self.like = torch.ones_like(self.layer.weight) + torch.zeros_like(x[0])
        assert self.like is not None
        out: Tensor = self.norm(self.layer(x)) @ self.table @ self.like
        return out


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("policy", [None, "float16"])
@pytest.mark.parametrize("donate", [True, False])
def test_a_table_of_a_buffer_that_no_step_changes_may_be_kept(donate: bool, policy: str | None) -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        step = make_train_step(module_loss(Rotary(), square), SGD, policy=policy)
        run: Any = jit(step, backend="eager", donate=donate) if compiled else step
        state, losses = step.init(), []
        for batch in BATCHES:
            state, metrics = run(state, batch)
            losses.append(metrics.loss)
        results.append(losses)
    assert_same(results[1], results[0])


def test_a_tensor_that_a_plain_function_keeps_of_its_state_is_refused() -> None:
    held: list[Tensor] = []

    def step(state: Tensor, batch: Tensor) -> Any:
        if not held:
            held.append(state.clone())
        return state + (batch * held[0]).sum(), None

    with pytest.raises(RuntimeError, match=r"must not keep a tensor in Python from call to call.*shape \(\) on cpu"):
        jit(step, backend="eager")(torch.ones(()), torch.ones(3))


class _Output:
    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.functions = [lambda: value]


class _KeepsAnObject(nn.Module):
    """Keeps its last output in a new object at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.last = _Output(torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        self.last = _Output(out.detach())
        return out


def test_a_tensor_of_state_is_not_taken_for_one_that_died_before_it(caplog: pytest.LogCaptureFixture) -> None:
    """The ids of tensors that died in a trace come back: in two of five traces that of a tensor which is written."""
    batch = (torch.linspace(-1, 1, 12).reshape(3, 4), torch.ones(3, 4))
    for _ in range(10):
        step = make_train_step(module_loss(_KeepsAnObject(), F.mse_loss), stateless(torch.optim.SGD, lr=0.1))
        jit(step, backend="eager")(step.init(), batch)
    assert "Python keeps tensors" not in caplog.text


class Delayed(nn.Module):
    """Reads what it kept two or three calls before."""

    def __init__(self, how: str, delay: int) -> None:
        super().__init__()
        self.linear, self.how, self.delay = nn.Linear(4, 1), how, delay
        self.kept: list[Tensor | None] = [None] * delay

    def forward(self, x: Tensor) -> Tensor:
        oldest = self.kept[0]
        if self.how == "a new list":
            self.kept = [*self.kept[1:], x.detach().mean(0)]
        else:
            self.kept.append(x.detach().mean(0))
            self.kept.pop(0)
        out: Tensor = self.linear(x if oldest is None else x + oldest)
        return out


@pytest.mark.parametrize("how", ["a new list", "in place"])
@pytest.mark.parametrize("delay", [1, 2, 3])
def test_a_tensor_that_is_read_some_calls_later_is_refused(how: str, delay: int) -> None:
    step = make_train_step(module_loss(Delayed(how, delay), F.mse_loss), SGD)
    with pytest.raises(RuntimeError, match=r"must not keep a tensor in Python from call to call.*model\.kept\[0\]"):
        jit(step, backend="eager")(step.init(), (torch.randn(5, 4), torch.randn(5, 1)))


def test_a_tensor_of_another_dtype_beside_one_that_is_carried_is_refused() -> None:
    class Window(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
            self.means = [torch.zeros(4), torch.zeros(4)]

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x)
            self.means = [self.means[1], hidden.detach().mean(0)]
            out: Tensor = self.head(hidden - self.means[0])
            return out

    batch = torch.randn(5, 4), torch.randn(5, 1)
    step = make_train_step(module_loss(Window(), F.mse_loss), SGD, policy="bfloat16")
    with pytest.raises(
        RuntimeError, match=r"model\.means\[1\] than was there; it changed from .*float32.* to .*bfloat16"
    ):
        jit(step, backend="eager")(step.init(), batch)

    def states(*, jitted: bool) -> list[Any]:
        torch.manual_seed(0)
        step = make_train_step(module_loss(Window(), F.mse_loss), SGD)
        run, found = jit(step, backend="eager", donate=False) if jitted else step, [step.init()]
        for _ in range(4):
            found.append(run(found[-1], batch)[0])
        return found

    assert_same(states(jitted=True), states(jitted=False))
