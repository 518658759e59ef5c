"""What a jitted step's Python keeps of its one run is what an eager step would have kept: caches, views, modules."""

from __future__ import annotations

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


def test_random_numbers_that_are_kept_are_those_of_the_first_step() -> None:
    lazy = Lazy(lambda: torch.randn(3))
    torch.manual_seed(0)
    expected = torch.randn(3)
    run, state = jit(lambda state, batch: (state + (lazy() * batch).sum(), None), backend="eager"), torch.zeros(())
    torch.manual_seed(0)
    for _ in range(2):
        state, _ = run(state, X)
    assert_same(lazy.held, expected)
    assert_same(state, 2 * (expected * X).sum())


class KeepsItsBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        self.last = x
        return self.linear(x)


def test_a_part_of_the_batch_that_nothing_reads_again_may_be_kept(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = KeepsItsBatch(), (torch.ones(2, 3), torch.zeros(2, 3))
    step = make_train_step(module_loss(model, F.mse_loss), stateless(torch.optim.SGD, lr=0.1))
    run = jit(step, backend="eager")
    state, metrics = run(step.init(), batch)
    assert_same(metrics.loss, step(step.init(), batch)[1].loss)
    assert_same(model.last, batch[0])
    assert "model.last" in caplog.text
    run(state, (torch.ones(1, 3), torch.zeros(1, 3)))


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
