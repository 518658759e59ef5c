"""Tensors that a step reads besides its arguments: as inputs of the program, and changed after it was compiled."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree

from funcamp import jit, loss, make_train_step
from tests.support.steps import SGD, assert_as_eager


@pytest.mark.parametrize("donate", [False, True])
def test_a_teacher_that_requires_gradients_gets_none(donate: bool) -> None:
    teacher = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval())

    def distill(params: Any, x: Tensor) -> Any:
        target = teacher(x)
        return F.mse_loss(x @ params["w"], target), {"target": target, "part": target[:2]}

    step = make_train_step(loss(distill, has_aux=True), SGD)
    run, state = jit(step, backend="aot_eager", donate=donate), step.init({"w": torch.ones(4, 4)})
    rows = assert_as_eager(step, run, state, [torch.rand(size, 4) for size in (8, 8, 6)])
    assert not any(leaf.requires_grad for leaf in _pytree.tree_leaves(rows) if isinstance(leaf, Tensor))


@pytest.mark.inductor
def test_an_operation_of_torch_on_a_parameter_that_is_read_returns_no_graph() -> None:
    weight = nn.Parameter(torch.eye(4))
    run, state = jit(lambda state, x: (state + 1, torch.linalg.inv(weight))), torch.zeros(())
    for _ in range(2):
        state, inverse = run(state, torch.ones(()))
        assert not inverse.requires_grad
        assert torch.equal(inverse, torch.eye(4))


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "dtype": lambda leaf: setattr(leaf, "data", leaf.bfloat16()),
    "dtype in the same memory": lambda leaf: setattr(leaf, "data", leaf.view(torch.int32)),
    "shape": lambda leaf: setattr(leaf, "data", torch.zeros(2, 3)),
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


def test_a_tensor_that_no_program_reads_any_more_is_free() -> None:
    holder = {"table": torch.ones(3)}
    run = jit(lambda state, batch: (state + (holder["table"] * batch).sum(), None), backend="eager", max_signatures=1)
    state = torch.zeros(())
    state, _ = run(state, torch.ones(()))
    first = holder["table"]
    for factor in (2.0, 3.0):
        holder["table"] = torch.full((3,), factor)
        state, _ = run(state, torch.ones(()))
    assert state == 18
    first.data = first.bfloat16()  # else an error: a program has the dtype in its code
    state, _ = run(state, torch.ones(()))
    assert state == 27
    alive = weakref.ref(first)
    del first
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("signatures", [1, 2])
def test_a_captured_tensor_is_looked_at_after_a_program_was_dropped(signatures: int) -> None:
    weights = [torch.ones(2, 3) for _ in range(4)]
    now = {"weight": weights[0]}
    run = jit(lambda s, x: (s + 1, now["weight"].sum() * x * s), backend="eager", max_signatures=signatures)
    state = torch.ones(())
    for weight in weights:
        now["weight"] = weight
        state, _ = run(state, torch.ones(()))
    run(weight.view(-1)[0], torch.ones(()))  # a state in the memory of what the newest program reads
    assert torch.equal(weight, torch.ones(2, 3))
    weight.data = weight.double()
    with pytest.raises(RuntimeError, match="as they were"):
        run(state, torch.ones(()))
