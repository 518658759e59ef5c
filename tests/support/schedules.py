"""Steps with a schedule, in torch's loop and in funcamp's: the numbers that each uses, and the parameters after it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim

from funcamp import ScalerConfig, TrainStep
from tests.support.helpers import assert_close, clone
from tests.support.torch_loop import Scaled, linear_loss, linear_step

Make = Callable[[Any], Any]
STEPS = 14
#: Steps whose gradients are infinite; torch's scaler skips them.
INFINITE = {0, 4, 5, 11}
APPLIED = STEPS - len(INFINITE)
CONFIG = ScalerConfig(init_scale=2.0**10, growth_interval=4)

SHAPES = {"w": (4, 3), "v": (5,)}
#: What a scheduler of torch may change.
NUMBERS = ("lr", "momentum", "betas")


def parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def batch(step: int) -> dict[str, Tensor]:
    """Return the gradients of a step. They are powers of 2, whose products have no rounding."""
    generator = torch.Generator().manual_seed(step)
    powers = {name: torch.randint(-3, 3, shape, generator=generator) for name, shape in SHAPES.items()}
    value = {name: torch.exp2(power.float()) for name, power in powers.items()}
    if step in INFINITE:
        value["v"][0] = math.inf
    return value


Leaves = dict[str, Tensor]
#: What a step used and came to: the numbers of each parameter group, and the parameters.
Rows = list[tuple[list[dict[str, Any]], dict[str, Tensor]]]


def torchs_loop(make_optimizer: Callable[[Leaves], optim.Optimizer], make: Make, *, every_step: bool = False) -> Rows:
    """Train with torch; the scheduler advances at applied steps, or at every step."""
    leaves = {name: value.requires_grad_() for name, value in parameters().items()}
    optimizer = make_optimizer(leaves)
    scheduler = make(optimizer)
    scaled, rows = Scaled(optimizer, CONFIG), []
    for step in range(STEPS):
        numbers = [{name: group.get(name) for name in NUMBERS} for group in optimizer.param_groups]
        _, is_skipped = scaled.take(linear_loss(leaves, batch(step)))
        if every_step or not is_skipped:
            scheduler.step()
        rows.append((numbers, clone(leaves)))
    return rows


def funcamps_loop(optimizer: Any, wrap: Callable[[Any], Any] = lambda step: step) -> Rows:
    step = linear_step(optimizer, CONFIG)
    run, state = wrap(step), step.init(parameters())
    rows: Rows = []
    for number in range(STEPS):
        used = numbers_of(step, state)
        state, _ = run(state, batch(number))
        rows.append((used, clone(state.params.tree())))
    return rows


def numbers_of(step: TrainStep, state: Any) -> list[dict[str, Any]]:
    """Return the numbers of the next step, for each group, as a torch optimizer has them."""
    saved = step.to_torch(state)["optimizer"]
    optimizers = [saved] if "param_groups" in saved else saved.values()
    return [{name: group.get(name) for name in NUMBERS} for one in optimizers for group in one["param_groups"]]


def rates(rows: Rows) -> list[list[float]]:
    return [[group["lr"] for group in numbers] for numbers, _ in rows]


def assert_same_rows(actual: Rows, expected: Rows, *, exact: bool = True) -> None:
    """Equal hyperparameters at every step; equal parameters, or within a rounding of every update."""
    assert [numbers for numbers, _ in actual] == [numbers for numbers, _ in expected]
    for (_, params), (_, params_expected) in zip(actual, expected, strict=True):
        assert_close({name: params[name] for name in SHAPES}, params_expected, 0.0 if exact else 5e-7)


def all_of(cls: Any, **numbers: Any) -> Callable[[Leaves], optim.Optimizer]:
    return lambda leaves: cls(leaves.values(), **numbers)
