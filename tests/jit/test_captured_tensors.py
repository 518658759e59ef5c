"""Tensors that a step reads besides its arguments: as inputs of the program, and changed after it was compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree

from funcamp import jit, loss, make_train_step, stateless
from tests.support.helpers import assert_same, clone

ONE, OTHER, EMPTY = torch.arange(4.0), torch.arange(4.0) + 1, torch.zeros(0)
ONE_AGAIN = ONE


def step(states: list[Tensor], batch: Tensor) -> Any:
    """Reads them anywhere: before the state, alone, as a result, by several names, as a view, as constants."""
    s = states[0]
    new = [s + ONE + OTHER * batch, ONE * 1, ONE, states[3], torch.cat([EMPTY, ONE]), ONE * OTHER + s]
    metrics = [OTHER, ONE_AGAIN, ONE + ONE_AGAIN + ONE.view(-1), OTHER.view(2, 2), EMPTY, EMPTY + 1]
    return new, [*metrics, torch.tensor(3.0), torch.tensor([1.0, 2.0]) * OTHER[:2]]


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_captured_tensors_come_anywhere_in_a_step(donate: bool, backend: str) -> None:
    run, state = jit(step, backend=backend, donate=donate), [torch.zeros(4) for _ in range(6)]
    for _ in range(2):
        expected = clone(step(clone(state), torch.ones(4)))
        state, found = run(state, torch.ones(4))
        assert_same((state, found), expected)


def lstm() -> Callable[[Tensor], Tensor]:
    layer = nn.LSTM(4, 4)
    return lambda x: layer(x[None])[0][0]


#: Teachers whose parameters require gradients.
TEACHERS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "linear": lambda: nn.Linear(4, 4),
    "lstm": lstm,
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(),
}


def distilled(kind: str, **options: Any) -> Any:
    """The states and the metrics of steps on full and smaller batches."""
    torch.manual_seed(0)
    teacher = TEACHERS[kind]()

    def loss_fn(params: Any, x: Tensor) -> Any:
        target = teacher(x)
        return F.mse_loss(x @ params["w"], target), {"target": target, "part": target[:2]}

    step = make_train_step(loss(loss_fn, has_aux=True), stateless(torch.optim.SGD, lr=0.1))
    run: Any = jit(step, **options) if options else step
    state, found = step.init({"w": torch.ones(4, 4)}), []
    for size in (8, 8, 6, 8, 6):
        state, metrics = run(state, torch.linspace(-1, 1, 4 * size).view(size, 4))
        found.append((clone(state), metrics))
    return found


@pytest.mark.parametrize("kind", TEACHERS)
@pytest.mark.parametrize("donate", [False, True])
def test_a_teacher_that_requires_gradients_gets_none(kind: str, donate: bool) -> None:
    found = distilled(kind, backend="aot_eager", donate=donate)
    assert not any(leaf.requires_grad for leaf in _pytree.tree_leaves(found) if isinstance(leaf, Tensor))
    assert_same(found, distilled(kind))


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "dtype": lambda leaf: setattr(leaf, "data", leaf.bfloat16()),
    "shape": lambda leaf: setattr(leaf, "data", torch.zeros(2, 3)),
    "part": lambda leaf: setattr(leaf, "data", leaf.data[:1]),
    "resized": lambda leaf: leaf.resize_(1, 2),
    "transposed": lambda leaf: leaf.t_(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_captured_tensor_of_another_kind_is_refused(name: str) -> None:
    captured = torch.arange(8.0).view(2, 4)
    run, state = jit(lambda state, batch: (state + captured.sum() * batch, None), backend="eager"), torch.zeros(())
    state, _ = run(state, torch.ones(()))
    CHANGES[name](captured)
    for _ in range(2):
        kinds = r"got a torch.* tensor of shape .* for a torch.float32 tensor of shape \(2, 4\) on cpu"
        with pytest.raises(RuntimeError, match=rf"jit: step must find .* as they were .*{kinds}.*make another jit"):
            run(state, torch.ones(()))
    assert state.item() == 28
    captured.data = torch.arange(8.0).view(2, 4)  # as it was compiled for
    assert run(state, torch.ones(()))[0].item() == 56
