"""Every scheduler of torch as a schedule of a pure optimizer equals torch's loop, to the bit.

In torch's loop `scheduler.step()` is called after each step that `torch.amp.GradScaler` does not skip.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler, swa_utils
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from funcamp import ScalerConfig, TrainStep, by_group, jit, schedule, stateless
from tests.support.helpers import assert_close, assert_same, clone
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


def torchs_loop(
    make_optimizer: Callable[[Leaves], torch.optim.Optimizer], make: Make, *, every_step: bool = False
) -> Rows:
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


def all_of(cls: Any, **numbers: Any) -> Callable[[Leaves], torch.optim.Optimizer]:
    return lambda leaves: cls(leaves.values(), **numbers)


#: One scheduler of each class.
MAKE: dict[str, Make] = {
    "LambdaLR": lambda o: LambdaLR(o, lambda count: 1 / (1 + count)),
    "MultiplicativeLR": lambda o: MultiplicativeLR(o, lambda count: 1 - 0.1 / count),
    "StepLR": lambda o: StepLR(o, step_size=3, gamma=0.3),
    "MultiStepLR": lambda o: MultiStepLR(o, milestones=[2, 3, 7], gamma=0.7),
    "ConstantLR": lambda o: ConstantLR(o, factor=0.3, total_iters=6),
    "LinearLR": lambda o: LinearLR(o, start_factor=0.1, total_iters=8),
    "ExponentialLR": lambda o: ExponentialLR(o, gamma=0.9),
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, T_max=APPLIED, eta_min=1e-4),
    "PolynomialLR": lambda o: PolynomialLR(o, total_iters=9, power=2.0),
    "CosineAnnealingWarmRestarts": lambda o: CosineAnnealingWarmRestarts(o, T_0=2, T_mult=2),
    "CyclicLR": lambda o: CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3, mode="triangular2"),
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=APPLIED),
    "SequentialLR": lambda o: SequentialLR(o, [LinearLR(o, total_iters=3), ExponentialLR(o, 0.9)], milestones=[3]),
    "ChainedScheduler": lambda o: ChainedScheduler([ConstantLR(o, total_iters=7), ExponentialLR(o, 0.9)], optimizer=o),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=8),
}
#: The same for the steps that are skipped too.
LONGER: dict[str, Make] = {"OneCycleLR": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=STEPS)}
#: Classes of torch.optim with their hyperparameters.
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.03, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.03}),
}
#: They give SGD a momentum, whose products torch's CPU adds in one rounding.
ROUNDED = {("CyclicLR", "SGD"), ("OneCycleLR", "SGD")}


def test_every_scheduler_of_torch_is_tested() -> None:
    found = {
        name
        for module in (lr_scheduler, swa_utils)
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, LRScheduler) and not name.startswith("_")
    }
    assert found - {"LRScheduler", "ReduceLROnPlateau"} == set(MAKE)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # of torch's loop with every_step
def test_scheduler_equals_torchs_loop(name: str, optimizer: str) -> None:
    cls, numbers = OPTIMIZERS[optimizer]
    expected = torchs_loop(all_of(cls, **numbers), MAKE[name])
    assert rates(expected) != rates(torchs_loop(all_of(cls, **numbers), LONGER.get(name, MAKE[name]), every_step=True))
    scheduled = schedule(stateless(cls, **numbers), MAKE[name], steps=APPLIED)
    assert_same_rows(funcamps_loop(scheduled), expected, exact=(name, optimizer) not in ROUNDED)


@pytest.mark.compiled
@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("inductor", marks=[pytest.mark.thorough, pytest.mark.inductor])]
)
def test_jitted_step_equals_torchs_loop(backend: str) -> None:
    rows = funcamps_loop(
        schedule(stateless(torch.optim.AdamW), MAKE["OneCycleLR"], steps=APPLIED),
        lambda step: jit(step, backend=backend),
    )
    assert_same_rows(rows, torchs_loop(all_of(torch.optim.AdamW), MAKE["OneCycleLR"]), exact=backend == "eager")


@pytest.mark.compiled
def test_jit_of_a_step_over_members_follows_the_schedule() -> None:
    """The step's repr, for which `vmap` asks, reads no tensor in a trace."""
    step = linear_step(schedule(stateless(torch.optim.SGD), MAKE["CosineAnnealingLR"], steps=APPLIED))
    members = torch.func.vmap(step.init)({name: torch.stack([value, -value]) for name, value in parameters().items()})
    over_members = torch.func.vmap(step, in_dims=(0, None))
    run = jit(over_members, backend="eager", donate=False)
    expected = members
    for count in range(3):
        members, metrics = run(members, batch(count))
        expected, rows = over_members(expected, batch(count))
        assert_same((members, metrics.lr), (expected, rows.lr))


def by_shape(name: str, _: Tensor) -> str:
    return "matrix" if name == "w" else "vector"


def test_groups_that_are_scheduled_each_equal_those_of_torch() -> None:
    rest: Any = {"betas": (0.8, 0.99)}
    expected = torchs_loop(
        lambda leaves: torch.optim.AdamW(
            [
                {"params": [leaves["w"]], "weight_decay": 0.1},
                {"params": [leaves["v"]], "lr": 0.002, "weight_decay": 0.0},
            ],
            lr=0.03,
            **rest,
        ),
        MAKE["CosineAnnealingLR"],
    )
    assert all(a != b for a, b in rates(expected)[1:])

    def scheduled(**numbers: Any) -> Any:
        return schedule(stateless(torch.optim.AdamW, **numbers, **rest), MAKE["CosineAnnealingLR"], steps=APPLIED)

    grouped = by_group(
        {"matrix": scheduled(lr=0.03, weight_decay=0.1), "vector": scheduled(lr=0.002, weight_decay=0.0)},
        group=by_shape,
    )
    assert_same_rows(funcamps_loop(grouped), expected)


def test_past_the_last_step_the_last_value_remains_and_torch_gets_that_of_the_next_step() -> None:
    step = linear_step(schedule(stateless(torch.optim.SGD, lr=1.0), lambda o: ExponentialLR(o, 0.5), steps=3))
    state = step.init(parameters())
    for count, expected in ((0, 1.0), (1, 0.5), (2, 0.25), (3, 0.25), (1_000_000, 0.25)):
        state = state._replace(opt_state=state.opt_state._replace(applied=torch.tensor(count)))
        assert step.optimizer.learning_rate(state.opt_state) == expected
        (group,) = step.to_torch(state)["optimizer"]["param_groups"]
        assert group["lr"] == expected


def test_state_of_the_given_optimizer_continues_under_a_schedule() -> None:
    adamw = stateless(torch.optim.AdamW)
    params, opt_state = adamw.update(parameters(), batch(1), adamw.init(parameters()))
    before = repr(adamw)
    scheduled = schedule(adamw, lambda o: ExponentialLR(o, 0.5), steps=9)
    assert repr(adamw) == before
    assert "lr=<ExponentialLR: 9 values, 0.001" in repr(scheduled)
    assert scheduled.learning_rate(opt_state) == 0.5e-3
    scheduled.update(params, batch(2), opt_state)
    beta2 = torch.tensor(0.9)  # which the scheduler does not change
    cycled = schedule(stateless(torch.optim.Adam, betas=(0.8, beta2)), MAKE["OneCycleLR"], steps=APPLIED)
    assert f", {beta2!r})" in repr(cycled)


def test_plateau_fills_the_tensor_of_the_step() -> None:
    """As the documentation shows it."""
    lr = torch.tensor(0.4, dtype=torch.float64)
    plateau = ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)], lr=lr), factor=0.5, patience=0)
    sgd = stateless(torch.optim.SGD, lr=lr)
    opt_state = sgd.init(parameters())
    for metric, expected in ((1.0, 0.4), (2.0, 0.2), (2.0, 0.1)):
        plateau.step(metric)
        assert sgd.learning_rate(opt_state) == torch.tensor(expected)
