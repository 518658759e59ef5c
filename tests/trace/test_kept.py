"""What a jitted step's Python keeps of its one run is what an eager step would have kept: caches, views, modules."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcamp import _upstream, jit, make_train_step, module_loss, stateless
from tests.support.helpers import assert_same
from tests.support.models import lstm_policies

X = torch.tensor([1.0, 2.0, 3.0])


class Lazy:
    """Makes a tensor once and keeps it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self.held = make, None

    def __call__(self) -> Any:
        if self.held is None:
            self.held = self._make()
        return self.held


def table() -> Tensor:
    """The sines and cosines of positions, as tutorials fill them in."""
    made = torch.zeros(3, 4)
    angles = torch.arange(3.0)[:, None] * torch.tensor([1.0, 0.1])
    made[:, 0::2], made[:, 1::2] = angles.sin(), angles.cos()
    return made


def diagonal() -> Tensor:
    made = torch.zeros(3, 3)
    made.diagonal().fill_(5)
    made.t().mul_(2)
    return made


def rows() -> Tensor:
    made = torch.zeros(3, 3)
    made[0] = 5
    for row in made.unbind():
        row += 1
    return made


def base_and_view() -> list[Tensor]:
    base = torch.arange(3.0)
    view = base[1:]
    view.mul_(2)
    return [base, view]


MADE: dict[str, Callable[[], Any]] = {
    "filled through slices": table,
    "filled through a diagonal": diagonal,
    "filled row by row": rows,
    "a view": lambda: torch.ones(3, 3).tril()[None, None],
    "a slice": lambda: torch.arange(12.0)[:9].view(3, 3),
    "expanded": lambda: torch.ones(3, 1).expand(3, 3),
    "a tensor and a view of it": base_and_view,
    "in a dict": lambda: {3: torch.ones(3, 3).triu()},
    "a parameter": lambda: nn.Parameter(torch.eye(3), requires_grad=False),
    "nothing": lambda: torch.zeros(0, 3),
}


@pytest.mark.parametrize("name", MADE)
def test_a_cache_has_the_values_of_eager_code(name: str) -> None:
    lazy, expected = Lazy(MADE[name]), MADE[name]()

    def step(state: Tensor, batch: Tensor) -> Any:
        held = lazy()
        first = held[0] if isinstance(held, list) else held[3] if isinstance(held, dict) else held
        return state + batch.sum(), first.sum()

    run, state = jit(step, backend="eager"), torch.zeros(())
    for batch in (X, X, torch.ones(3, 2)):  # the last shape meets what the first left
        state, _ = run(state, batch)
    assert_same(lazy.held, expected)
    assert type(lazy.held) is type(expected)


def test_a_cache_of_a_function_has_values() -> None:
    @functools.lru_cache
    def mask(size: int) -> Tensor:
        return torch.ones(size, size).tril()[None]

    run, state = jit(lambda state, batch: (state + (mask(3) @ batch).sum(), None), backend="eager"), torch.zeros(())
    for _ in range(2):
        state, _ = run(state, X)
    assert state.item() == 20
    assert_same(mask(3), torch.ones(3, 3).tril()[None])


def test_what_is_held_where_nothing_can_take_its_place_is_refused() -> None:
    held: list[Any] = []

    class Tied:
        def __init__(self, value: Tensor) -> None:
            self.pair = (value, weakref.ref(value))

    def step(state: Tensor, batch: Tensor) -> Any:
        if not held:
            held.append(Tied(torch.ones(3)))
        return state + (held[0].pair[0] * batch).sum(), None

    with pytest.raises(
        RuntimeError, match=r"step must not keep a torch.float32 tensor of shape \(3,\) on cpu in Python"
    ):
        jit(step, backend="eager")(torch.zeros(()), X)


def test_random_numbers_that_are_kept_are_those_of_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    lazy = Lazy(lambda: torch.randn(3))

    def step(state: Tensor, batch: Tensor) -> Any:
        out = state + (lazy() * batch).sum()
        return out, torch.rand(3).sum()

    eager = Lazy(lambda: torch.randn(3))
    torch.manual_seed(0)
    expected, drawn = eager(), torch.rand(3)
    following = torch.rand(())
    torch.manual_seed(0)
    state, sampled = jit(step, backend="eager")(torch.zeros(()), X)
    assert_same(torch.rand(()), following)
    assert_same([sampled, state, lazy.held], [drawn.sum(), (expected * X).sum(), expected])
    (told,) = [record.message for record in caplog.records if record.name == "funcamp"]
    assert "are random, and a program draws them anew at every call" in told


class Counts(nn.Module):
    """Writes to tensors that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls, self.parts, self.mean = torch.zeros(()), [torch.zeros(2)], torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        self.parts[0][1] += 2
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        out: Tensor = self.linear(x) * self.calls + self.parts[0].sum() + self.mean
        return out


def test_a_tensor_of_its_own_is_written_once_a_call() -> None:
    runs = []
    for wrap in (lambda step: step, lambda step: jit(step, backend="eager")):
        torch.manual_seed(0)
        model = Counts()
        step = make_train_step(module_loss(model, F.mse_loss), stateless(torch.optim.SGD, lr=0.1))
        state, run, losses = step.init(), wrap(step), []
        for _ in range(3):
            state, metrics = run(state, (torch.ones(2, 3), torch.zeros(2, 3)))
            losses.append(metrics.loss)
        runs.append((losses, model.calls, model.parts, model.mean, state.params.tree()))
    assert_same(runs[1], runs[0])
    assert runs[1][1].item() == 3


def test_a_value_of_its_own_is_not_read_through_a_computation() -> None:
    own = torch.tensor(3.0)
    with pytest.raises(
        RuntimeError, match=r"must not read a tensor's value.*test_kept.py:\d+ \(.*\(own \* 2\).item\(\)"
    ):
        jit(lambda state, batch: (state * (own * 2).item(), None), backend="eager")(torch.zeros(()), X)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_tensor_of_its_own_is_refused(layout: str) -> None:
    own = torch.eye(3).to_sparse() if layout == "coo" else torch.eye(3).to_sparse_csr()
    with pytest.raises(RuntimeError, match=r"read strided tensors only, besides its arguments; .*make it dense"):
        jit(lambda state, batch: (state + (own @ batch[:, None]).sum(), None), backend="eager")(torch.zeros(()), X)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *[(nn.LSTM, policy) for policy in lstm_policies()],
        *[(kind, policy) for kind in (nn.GRU, nn.RNN) for policy in (None, "bfloat16")],
    ],
)
def test_recurrent_layers_keep_their_weights_and_equal_the_eager_step(
    kind: Any, dtype: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = kind(4, 5, num_layers=2, batch_first=True), nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.rnn(x)[0][:, -1])
            return out

    runs = []
    for wrap in (lambda step: step, lambda step: jit(step, backend="eager")):
        torch.manual_seed(0)
        model = Model()
        step = make_train_step(module_loss(model, F.mse_loss), stateless(torch.optim.SGD, lr=0.1), policy=dtype)
        state, run, losses = step.init(), wrap(step), []
        for index in range(3):
            state, metrics = run(state, (torch.ones(2, 3, 4) * index, torch.zeros(2, 1)))
            losses.append(metrics.loss)
        runs.append((losses, state.params.tree()))
        names = model.rnn._flat_weights_names
        assert all(value is getattr(model.rnn, name) for name, value in zip(names, model.rnn._flat_weights))
    if _upstream.VERSION < (2, 13) and kind is nn.LSTM and dtype is not None:
        # There eager code takes oneDNN's LSTM in bfloat16, a trace the operations one by one.
        torch.testing.assert_close(runs[1][1], runs[0][1], rtol=0, atol=1e-4)
    else:
        assert_same(runs[1], runs[0])
    assert not [record for record in caplog.records if record.name == "funcamp"]
