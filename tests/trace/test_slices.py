"""A trace records parameters of flat storage without dispatching views: what a program does with them is unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import Params, jit, loss, make_train_step, ravel
from tests.support.steps import SGD, assert_as_eager

X = torch.arange(6.0).reshape(2, 3)


def flat() -> Params:
    return ravel({"w": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1.0, 2.0]), "s": torch.tensor(3.0)})


def product(params: Any, x: Tensor) -> Any:
    return (x @ params["w"].t() + params["b"]).square().sum() * params["s"]


def written(params: Any, x: Tensor) -> tuple[Any, Tensor]:
    tree = params.tree()
    tree["w"].mul_(2)
    tree["b"][1:].add_(x.sum())
    return params, tree["w"].sum() + params.groups[0].sum()


def differentiated(params: Any, x: Tensor) -> tuple[Any, Tensor]:
    groups = [group.detach().requires_grad_() for group in params.groups]
    lost = product(Params(tuple(groups), params.layout).tree(), x)
    grads = torch.autograd.grad(lost, groups)
    return Params(tuple(g - 0.1 * d for g, d in zip(params.groups, grads)), params.layout), lost.detach()


def strided(params: Any, x: Tensor) -> tuple[Any, Tensor]:
    b = params.tree()["b"]
    return params, torch.as_strided(b, (3,), (0,)) * x.sum() + b.clone().as_strided((3,), (0,), 1)


@pytest.mark.parametrize("step", [written, differentiated, strided])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_program_is_that_of_views(step: Any, backend: str) -> None:
    assert_as_eager(step, jit(step, backend=backend), flat(), [X, X], 1e-6)


def test_parameters_of_identical_blocks_are_alike_in_a_trace() -> None:
    offsets: set[int] = set()

    def fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        offsets.update(int(param.storage_offset()) for param in params.values())
        return sum((x * param).sum() for param in params.values())  # type: ignore[return-value]

    step = make_train_step(loss(fn), SGD)
    params = {f"{number}": torch.ones(3) for number in range(4)}
    state = step.init(params)
    step(state, X)
    assert offsets == {0, 64, 128, 192}
    offsets.clear()
    jit(step, backend="eager")(state, X)
    assert offsets == {0}
