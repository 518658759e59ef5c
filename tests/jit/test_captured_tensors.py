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

STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "state first": lambda s, b: (s + ONE + OTHER * b, None),
    "state as it is": lambda s, b: (s, (ONE + 1, OTHER + 1)),
    "returned": lambda s, b: (ONE, (OTHER, ONE_AGAIN)),
    "several names": lambda s, b: (ONE + ONE_AGAIN + ONE.view(-1), (ONE_AGAIN, OTHER.view(2, 2))),
    "constants": lambda s, b: (ONE.detach(), (torch.tensor(3.0), torch.tensor([1.0, 2.0]) * OTHER[:2])),
    "one after the other": lambda s, b: (ONE * 1 + OTHER, (OTHER - ONE_AGAIN, OTHER * s)),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_captured_tensors_come_anywhere_in_a_step(name: str, donate: bool, backend: str) -> None:
    run, state = jit(STEPS[name], backend=backend, donate=donate), torch.zeros(4)
    for _ in range(2):
        expected, numbers = STEPS[name](state.clone(), torch.ones(4))
        state, found = run(state, torch.ones(4))
        assert_same((state, found), (expected, numbers))


@pytest.mark.inductor
def test_captured_tensors_come_first_in_a_program_by_inductor() -> None:
    steps = list(STEPS.values())

    def step(states: list[Tensor], batch: Tensor) -> Any:
        new, metrics = zip(*(one(state, batch) for one, state in zip(steps, states)))
        return list(new), list(metrics)

    start = [torch.zeros(4) for _ in steps]
    assert_same(jit(step, donate=False)(start, torch.ones(4)), step(start, torch.ones(4)))


def _unfrozen(kind: str) -> Callable[[Tensor], Tensor]:
    """Return a teacher for inputs of shape (n, 4) whose parameters require gradients, the same at every call."""
    torch.manual_seed(0)
    if kind == "lstm":
        layer = nn.LSTM(4, 4)
        return lambda x: layer(x[None])[0][0]
    if kind == "batch norm":  # in training mode it would write its statistics
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    return nn.Linear(4, 4)


UNFROZEN = ["linear", "lstm", "batch norm"]


def _distilled(kind: str, backend: str | None, donate: bool) -> Any:
    """Return the state and the metrics of steps on full and smaller batches; none of them may require gradients."""
    teacher = _unfrozen(kind)

    def loss_fn(params: Any, x: Tensor) -> Any:
        target = teacher(x)
        return F.mse_loss(x @ params["w"], target), {"target": target, "part": target[:2]}

    step = make_train_step(loss(loss_fn, has_aux=True), stateless(torch.optim.SGD, lr=0.1))
    run: Any = step if backend is None else jit(step, backend=backend, donate=donate)
    state, found = step.init({"w": torch.ones(4, 4)}), []
    for size in (8, 8, 6, 8, 6):
        state, metrics = run(state, torch.linspace(-1, 1, 4 * size).view(size, 4))
        leaves = _pytree.tree_leaves((state, metrics))
        assert backend is None or not any(leaf.requires_grad for leaf in leaves if isinstance(leaf, Tensor))
        found.append((clone(state), metrics))
    return found


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("kind", UNFROZEN)
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_teacher_that_requires_gradients_gets_none(kind: str, donate: bool, backend: str) -> None:
    assert_same(_distilled(kind, backend, donate), _distilled(kind, None, donate))


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "dtype": lambda leaf: setattr(leaf, "data", leaf.half()),
    "shape": lambda leaf: setattr(leaf, "data", torch.zeros(2, 3)),
    "resized": lambda leaf: leaf.resize_(1, 2),
    "transposed": lambda leaf: leaf.t_(),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_captured_tensor_of_another_kind_is_refused(name: str, backend: str) -> None:
    captured = torch.arange(8.0).view(2, 4)
    run, state = jit(lambda state, batch: (state + captured.sum() * batch, None), backend=backend), torch.zeros(())
    state, _ = run(state, torch.ones(()))
    CHANGES[name](captured)
    for _ in range(2):
        kinds = r"got a torch.* tensor of shape .* for a torch.float32 tensor of shape \(2, 4\) on cpu"
        with pytest.raises(RuntimeError, match=rf"jit: step must find .* as they were .*{kinds}.*make another jit"):
            run(state, torch.ones(()))
    assert state.item() == 28
    captured.data = torch.arange(8.0).view(2, 4)  # as it was compiled for
    assert run(state, torch.ones(()))[0].item() == 56
