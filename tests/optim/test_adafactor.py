"""Adafactor made pure follows torch.optim.Adafactor on tensors of every number of dimensions, flat storage included.

Tolerance: 1e-6 of a leaf's norm: torch's scalars are Python floats, and its CPU adds a scaled update in one rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from funcamp import make_train_step, ravel, stateless
from tests.support.helpers import assert_close
from tests.support.torch_loop import TorchLoop

SHAPES = {"conv": (4, 3, 3, 3), "matrix": (8, 5), "row": (1, 6), "vector": (7,), "one": ()}
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"lr": 0.5, "weight_decay": 0.1, "d": 2.0},
    {"lr": 3.0, "beta2_decay": -0.5, "eps": (1e-4, 0.1), "maximize": True},
]


def tensors(scale: float = 1.0) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) * scale for name, shape in SHAPES.items()}


# Not under vmap: state for matrices alone is a None for vectors, which vmap does not take (test_optim.py has it).
@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(lambda fn: fn, id="eager"),
        pytest.param(lambda fn: torch.compile(fn, fullgraph=True, backend="aot_eager"), id="compiled"),
    ],
)
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_adafactor_follows_torch(arguments: dict[str, Any], flat: bool, how: Callable[..., Any]) -> None:
    assert_follows_torch(arguments, flat, how)


@pytest.mark.thorough(keep=1)
@pytest.mark.inductor
@pytest.mark.parametrize("flat", [True, False])
def test_adafactor_in_generated_code_follows_torch(flat: bool) -> None:
    assert_follows_torch(ARGUMENTS[-1], flat, lambda fn: torch.compile(fn, fullgraph=True))


def assert_follows_torch(arguments: dict[str, Any], flat: bool, how: Callable[..., Any]) -> None:
    params = tensors()
    loop = TorchLoop(torch.optim.Adafactor, params, **arguments)
    optimizer = stateless(torch.optim.Adafactor, **arguments)
    state: Any = ravel(params) if flat else params
    opt_state = optimizer.init(state)
    update = how(lambda p, g, s: optimizer.update(p, g, s))
    for step in range(4):
        grads = tensors(10.0 ** (step - 2))
        state, opt_state = update(state, state.ravel(grads) if flat else grads, opt_state)
        assert_close(state.tree() if flat else state, loop.step(grads), 1e-6)


def test_a_training_step_on_flat_storage_follows_torch() -> None:
    torch.manual_seed(0)
    weights = {"w": torch.randn(6, 4), "b": torch.zeros(4)}
    x, y = torch.randn(8, 6), torch.randn(8, 4)

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = (batch @ params["w"] + params["b"] - y).square().mean()
        return loss

    step = make_train_step(loss_fn, stateless(torch.optim.Adafactor, lr=0.05))
    state = step.init(weights)
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    eager = torch.optim.Adafactor(leaves.values(), lr=0.05)
    for _ in range(5):
        state, _ = step(state, x)
        eager.zero_grad()
        loss_fn(leaves, x).backward()
        eager.step()
    assert_close(state.params.tree(), {name: leaf.detach() for name, leaf in leaves.items()}, 1e-5)


def test_a_rate_of_zero_changes_no_parameter() -> None:
    params = tensors()
    optimizer = stateless(torch.optim.Adafactor, lr=0.0)
    flat = ravel(params)
    new, _ = optimizer.update(flat, flat, optimizer.init(flat))
    assert_close(new.tree(), params, 0.0)
