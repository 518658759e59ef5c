"""Every hyperparameter of every class of torch.optim as a tensor or a schedule follows torch's loop.

In torch's loop a number is assigned to the parameter group before each step. Tolerance: 5e-7 of a leaf's norm,
because torch's CPU adds a scaled gradient in one rounding; Muon multiplies in bfloat16.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import jit, ravel, skip_step, stateless
from tests.support.helpers import assert_close, assert_same, clone
from tests.support.oracle import state_of
from tests.support.torch_loop import TorchLoop, linear_step, randn_like

optim = torch.optim
CLASSES = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad),
    *(optim.Adadelta, optim.RMSprop, optim.ASGD, optim.Rprop, optim.Adafactor, optim.Muon),
)
#: Numbers that are constants.
CONSTANTS = {"ns_steps", "ns_coefficients"}
#: Other arguments that make a hyperparameter matter.
WITH: dict[str, dict[str, Any]] = {
    "SGD-dampening": {"momentum": 0.9},
    "SGD-lr": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "AdamW-eps": {"amsgrad": True},
    "NAdam-weight_decay": {"decoupled_weight_decay": True},
    "RMSprop-alpha": {"centered": True},
    "RMSprop-lr": {"momentum": 0.9, "maximize": True},
    "ASGD-t0": {"lambd": 0.01},
    "ASGD-alpha": {"lambd": 0.5},
    "Adafactor-d": {"lr": 0.5},
}
#: Values at which a hyperparameter matters, if not near the class's default.
VALUES: dict[str, float] = {
    "SGD-lr": 0.1,
    "SGD-weight_decay": 0.1,
    "SGD-momentum": 0.7,
    "SGD-dampening": 0.2,
    "RMSprop-momentum": 0.7,
    "ASGD-t0": 2.0,
    "ASGD-lambd": 0.1,
    "Rprop-step_sizes[1]": 0.02,
    "Adafactor-eps[0]": 0.2,
    "Adafactor-eps[1]": 0.3,
    "Adafactor-lr": 0.2,
    "Muon-eps": 3.0,
    "Muon-lr": 0.02,
    "Adagrad-initial_accumulator_value": 0.3,
    "Rprop-step_sizes[0]": 0.008,
    "Adamax-eps": 0.5,
}
STEPS = 5


def numbers(cls: type[optim.Optimizer]) -> dict[str, float]:
    """Return each number among a class's arguments, "betas[0]" too, with its default."""
    found: dict[str, float] = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        default = parameter.default
        if name in CONSTANTS:
            continue
        if isinstance(default, (int, float)) and not isinstance(default, bool):
            found[name] = default
        elif isinstance(default, tuple):
            found |= {f"{name}[{index}]": item or 0.0 for index, item in enumerate(default)}
    return found


def arguments_of(case: str, value: Any) -> dict[str, Any]:
    """Return a class's arguments with a value for the number in question."""
    cls, label = CASES[case]
    name, is_item, index = label.partition("[")
    if is_item:
        items = list(inspect.signature(cls).parameters[name].default)
        items[int(index[:-1])] = value
        value = tuple(items)
    return {**WITH.get(case, {}), name: value}


CASES = {f"{cls.__name__}-{label}": (cls, label) for cls in CLASSES for label in numbers(cls)}


def values(case: str) -> list[float]:
    """Return a value for each step; all are in the class's range, and the first is not 0."""
    cls, label = CASES[case]
    base = VALUES.get(case, numbers(cls)[label]) or 0.1
    rate = -0.01 if label in ("d", "etas[1]") else 0.02
    return [base * (1 - rate * step) for step in range(STEPS)]


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    scale = 10.0 ** (step % 3 - 1)
    return {name: torch.randn(shape, generator=generator) * scale for name, shape in SHAPES.items()}


SHAPES = {"w": (4, 3), "v": (2, 5)}


def parameters() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def loop(cls: type[optim.Optimizer], arguments: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Take torch's steps, each with its arguments; return the parameters after each."""
    torchs = TorchLoop(cls, parameters(), **arguments[0])
    trajectory = []
    for step, given in enumerate(arguments):
        torchs.optimizer.param_groups[0].update(given)
        trajectory.append(clone(torchs.step(gradients(step))))
    return trajectory


def tolerance(cls: type[optim.Optimizer]) -> float:
    return 1e-3 if cls is optim.Muon else 5e-7


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("flat", [False, True], ids=["per_tensor", "flat"])
@pytest.mark.parametrize("case", CASES)
def test_schedule_follows_torchs_loop(case: str, flat: bool) -> None:
    cls, _ = CASES[case]
    expected = loop(cls, [arguments_of(case, value) for value in values(case)])
    table = torch.tensor(values(case), dtype=torch.float64)

    def schedule(applied: Tensor) -> Any:
        return table[applied].item() if flat else table[applied]  # a number or a tensor

    optimizer = stateless(cls, **arguments_of(case, schedule))
    params: Any = ravel(parameters()) if flat else parameters()
    opt_state = optimizer.init(params)
    for step in range(STEPS):
        given = gradients(step)
        new = optimizer.update(params, params.ravel(given) if flat else given, opt_state)
        skipped = skip_step(state_of(8.0, found_inf=1.0), new=new, old=(params, opt_state))
        assert_same(skipped, (params, opt_state))
        params, opt_state = new
        result = params.tree() if flat else params
        assert_close(result, expected[step], tolerance(cls))


GENERATED = ["SGD-momentum", "AdamW-weight_decay", "Adafactor-eps[1]"]


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *((case, "eager") for case in CASES),
        *(pytest.param(case, "inductor", marks=pytest.mark.inductor) for case in GENERATED),
    ],
)
def test_jitted_step_follows_torchs_loop(case: str, backend: str) -> None:
    """A tensor that `fill_` changes between the steps of one program."""
    cls, _ = CASES[case]
    # A value that the state takes before the first step does not change later.
    scheduled = values(case)[:3]
    expected = loop(cls, [arguments_of(case, value) for value in scheduled])
    hyperparameter = torch.tensor(scheduled[0], dtype=torch.float64)
    step = linear_step(stateless(cls, **arguments_of(case, hyperparameter)))
    run = jit(step, backend=backend)
    state = step.init(parameters())
    for number, value in enumerate(scheduled):
        hyperparameter.fill_(value)
        state, _ = run(state, gradients(number))
        tree = state.params.tree()
        assert_close({name: tree[name] for name in SHAPES}, expected[number], tolerance(cls))


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("case", CASES)
def test_vmap_over_members_and_their_hyperparameters_equals_each(case: str) -> None:
    cls, _ = CASES[case]
    members = torch.tensor(values(case)[:3], dtype=torch.float64)
    stacked = {name: torch.stack([value, 2 * value, -value]) for name, value in parameters().items()}
    first, second = gradients(0), gradients(1)

    def two_steps(value: Tensor, params: dict[str, Tensor]) -> Any:
        optimizer = stateless(cls, **arguments_of(case, value))
        moved, opt_state = optimizer.update(params, first, optimizer.init(params))
        return optimizer.update(moved, second, opt_state)[0]

    batched = torch.func.vmap(two_steps)(members, stacked)
    for index, value in enumerate(members):
        row, params = ({name: leaf[index] for name, leaf in tree.items()} for tree in (batched, stacked))
        assert_close(row, two_steps(value, params), max(tolerance(cls), 1e-6))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.float64])
@pytest.mark.parametrize(
    ("cls", "numeric"),
    [
        (optim.SGD, {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.7}),
        (optim.AdamW, {"lr": 0.1, "weight_decay": 0.3, "eps": 0.01, "betas": (0.7, 0.8)}),
        (optim.RMSprop, {"lr": 0.1, "weight_decay": 0.3, "eps": 0.01}),
    ],
)
def test_other_dtypes_and_scalars_round_as_torchs_numbers(cls: Any, numeric: Any, dtype: torch.dtype) -> None:
    as_tensors = torch.utils._pytree.tree_map(lambda value: torch.tensor(value, dtype=torch.float64), numeric)
    params = {str(shape): torch.randn(shape, dtype=dtype) for shape in ((), (6,), (2, 3))}
    optimizer, torchs = stateless(cls, **as_tensors), TorchLoop(cls, params, **numeric)
    opt_state = optimizer.init(params)
    for _ in range(4):
        grads = randn_like(params)
        params, opt_state = optimizer.update(params, grads, opt_state)
        assert {value.dtype for value in params.values()} == {dtype}
        assert_close(params, torchs.step(grads), 2 * torch.finfo(dtype).eps)
