"""Every hyperparameter of every class of torch.optim as a tensor or a schedule follows torch's loop.

In torch's loop a number is assigned to the parameter group before each step. Tolerance: 5e-7 of a leaf's norm,
because torch's CPU adds a scaled gradient in one rounding; Muon multiplies in bfloat16.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import jit, make_train_step, ravel, skip_step, stateless
from tests.support.helpers import assert_close, assert_same
from tests.support.oracle import state_of

optim = torch.optim
CLASSES = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad),
    *(optim.Adadelta, optim.RMSprop, optim.ASGD, optim.Rprop, optim.Adafactor, optim.Muon),
)
#: Numbers that a class uses as a size of a loop.
SIZES = {"ns_steps"}
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
Set = Callable[[Any], dict[str, Any]]


def numbers(cls: type[optim.Optimizer]) -> dict[str, tuple[Set, float]]:
    """Return for each number among a class's arguments how to set it, and its default."""
    setters: dict[str, tuple[Set, float]] = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        default = parameter.default
        if name in SIZES or isinstance(default, bool):
            continue
        if isinstance(default, (int, float)):

            def put_alone(value: Any, name: str = name) -> dict[str, Any]:
                return {name: value}

            setters[name] = put_alone, float(default)
        if isinstance(default, tuple):
            for index, item in enumerate(default):

                def put(value: Any, name: str = name, index: int = index, default: Any = default) -> dict[str, Any]:
                    return {name: (*default[:index], value, *default[index + 1 :])}

                setters[f"{name}[{index}]"] = put, item or 0.0
    return setters


CASES = {f"{cls.__name__}-{label}": (cls, label) for cls in CLASSES for label in numbers(cls)}


def values(case: str) -> list[float]:
    """Return a value for each step; all are in the class's range, and the first is not 0."""
    cls, label = CASES[case]
    base = VALUES.get(case, numbers(cls)[label][1]) or 0.1
    rate = -0.01 if label in ("d", "etas[1]") else 0.02
    if label.startswith("ns_"):
        rate = 0.001  # the iteration does not converge with others
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
    leaves = {name: value.requires_grad_() for name, value in parameters().items()}
    optimizer = cls(leaves.values(), **arguments[0])
    trajectory = []
    for step, given in enumerate(arguments):
        for name, leaf in leaves.items():
            leaf.grad = gradients(step)[name]
        optimizer.param_groups[0].update(given)
        optimizer.step()
        trajectory.append({name: leaf.detach().clone() for name, leaf in leaves.items()})
    return trajectory


def tolerance(cls: type[optim.Optimizer], label: str) -> float:
    if cls is optim.Muon:
        return 2e-2 if label.startswith("ns_") else 1e-3
    return 5e-7


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("flat", [False, True], ids=["per_tensor", "flat"])
@pytest.mark.parametrize("case", CASES)
def test_schedule_follows_torchs_loop(case: str, flat: bool) -> None:
    cls, label = CASES[case]
    put, _ = numbers(cls)[label]
    expected = loop(cls, [WITH.get(case, {}) | put(value) for value in values(case)])
    table = torch.tensor(values(case), dtype=torch.float64)
    optimizer = stateless(cls, **WITH.get(case, {}) | put(lambda applied: table[applied]))
    params: Any = ravel(parameters()) if flat else parameters()
    opt_state = optimizer.init(params)
    for step in range(STEPS):
        given = gradients(step)
        new = optimizer.update(params, params.ravel(given) if flat else given, opt_state)
        skipped = skip_step(state_of(8.0, found_inf=1.0), new=new, old=(params, opt_state))
        assert_same(skipped, (params, opt_state))
        params, opt_state = new
        result = params.tree() if flat else params
        assert_close(result, expected[step], tolerance(cls, label))


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("case", CASES)
def test_jitted_step_follows_torchs_loop(case: str) -> None:
    assert_step_follows_torch(case, "eager")


@pytest.mark.thorough(keep=1)
@pytest.mark.inductor
@pytest.mark.parametrize("case", ["SGD-momentum", "AdamW-weight_decay", "Adafactor-eps[1]"])
def test_generated_code_follows_torchs_loop(case: str) -> None:
    assert_step_follows_torch(case, "inductor")


def assert_step_follows_torch(case: str, backend: str) -> None:
    """A tensor that `fill_` changes between the steps of one program."""
    cls, label = CASES[case]
    put, _ = numbers(cls)[label]
    # A value that the state takes before the first step does not change later.
    scheduled = values(case)[:3]
    expected = loop(cls, [WITH.get(case, {}) | put(value) for value in scheduled])
    hyperparameter = torch.tensor(scheduled[0], dtype=torch.float64)

    def loss_fn(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return torch.stack([(params[name] * batch[name]).sum() for name in params]).sum()

    step = make_train_step(loss_fn, stateless(cls, **WITH.get(case, {}) | put(hyperparameter)))
    run = jit(step, backend=backend)
    state = step.init(parameters())
    for number, value in enumerate(scheduled):
        hyperparameter.fill_(value)
        state, _ = run(state, gradients(number))
        tree = state.params.tree()
        assert_close({name: tree[name] for name in SHAPES}, expected[number], tolerance(cls, label))


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("case", CASES)
def test_vmap_over_a_hyperparameter_equals_each_value(case: str) -> None:
    cls, label = CASES[case]
    put, _ = numbers(cls)[label]
    members = torch.tensor(values(case)[:3], dtype=torch.float64)
    params, first, second = parameters(), gradients(0), gradients(1)

    def two_steps(value: Tensor) -> Any:
        optimizer = stateless(cls, **WITH.get(case, {}) | put(value))
        moved, opt_state = optimizer.update(params, first, optimizer.init(params))
        return optimizer.update(moved, second, opt_state)[0]

    batched = torch.func.vmap(two_steps)(members)
    for index, value in enumerate(members):
        row = {name: leaf[index] for name, leaf in batched.items()}
        assert_close(row, two_steps(value), max(tolerance(cls, label), 1e-6))


def assert_updates_follow(optimizer: Any, expected: list[dict[str, Tensor]]) -> None:
    """The parameters after each update are those of torch's loop, with its gradients."""
    params = parameters()
    opt_state = optimizer.init(params)
    for step, params_after in enumerate(expected):
        params, opt_state = optimizer.update(params, gradients(step), opt_state)
        assert_close(params, params_after, 5e-7)


def piecewise(*table: float) -> Callable[[Tensor], Tensor]:
    return lambda applied: torch.tensor(table, dtype=torch.float64)[applied]


@pytest.mark.parametrize(
    "arguments",
    [
        {"momentum": (0.0, 0.0, 0.9, 0.0, 0.8)},
        {"momentum": (0.5, 0.0, 0.9, 0.0, 0.8), "nesterov": True},
        {"momentum": (0.0, 0.9, 0.0, 0.0, 0.8), "dampening": 0.3},
        {"momentum": (0.0, 0.9, 0.0, 0.7, 0.8), "dampening": (0.3, 0.0, 0.2, 0.1, 0.5)},
        {"momentum": 0.9, "dampening": (0.0, 0.0, 0.2, 0.1, 0.5)},
        {"weight_decay": (0.0, 0.1, 0.0, 0.2, 0.0), "momentum": (0.9, 0.0, 0.0, 0.9, 0.9)},
    ],
    ids=lambda value: "-".join(value),
)
def test_momentum_that_is_sometimes_zero_follows_torchs_loop(arguments: dict[str, Any]) -> None:
    """torch's SGD then neither reads nor writes the buffer."""
    scheduled = [
        {name: value[step] if isinstance(value, tuple) else value for name, value in arguments.items()}
        for step in range(STEPS)
    ]
    expected = loop(optim.SGD, scheduled)
    given = {name: piecewise(*value) if isinstance(value, tuple) else value for name, value in arguments.items()}
    assert_updates_follow(stateless(optim.SGD, **given), expected)


def test_momentum_that_becomes_zero_leaves_the_buffer_of_rmsprop_alone() -> None:
    momenta = (0.9, 0.0, 0.0, 0.5, 0.0)
    expected = loop(optim.RMSprop, [{"momentum": value} for value in momenta])
    assert_updates_follow(stateless(optim.RMSprop, momentum=piecewise(*momenta)), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.float64])
@pytest.mark.parametrize("cls", [optim.SGD, optim.AdamW, optim.RMSprop], ids=lambda cls: cls.__name__)
def test_other_dtypes_and_scalars_round_as_torchs_numbers(cls: Any, dtype: torch.dtype) -> None:
    numeric = {"lr": 0.1, "weight_decay": 0.3, "eps": 0.01}
    if cls is optim.SGD:
        numeric = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.7}
    if cls is optim.AdamW:
        numeric |= {"betas": (0.7, 0.8)}  # type: ignore[dict-item]
    as_tensors = torch.utils._pytree.tree_map(lambda value: torch.tensor(value, dtype=torch.float64), numeric)
    for shape in ((), (6,), (2, 3)):
        weight = torch.randn(shape, dtype=dtype)
        leaf = weight.clone().requires_grad_()
        eager, optimizer = cls([leaf], **numeric), stateless(cls, **as_tensors)
        opt_state = optimizer.init(weight)
        for _ in range(4):
            grad = torch.randn(shape, dtype=dtype)
            leaf.grad = grad.clone()
            eager.step()
            weight, opt_state = optimizer.update(weight, grad, opt_state)
            assert weight.dtype == dtype
            pair = [torch.view_as_real(t) if t.is_complex() else t for t in (weight, leaf.detach())]
            assert_close(pair[0], pair[1], 2 * torch.finfo(dtype).eps)


def test_rprop_of_a_scalar_finds_what_it_set_to_a_tensor() -> None:
    weight, leaf = torch.tensor(1.0), torch.tensor(1.0, requires_grad=True)
    eager = optim.Rprop([leaf], etas=(0.3, 1.2))
    optimizer = stateless(optim.Rprop, etas=(torch.tensor(0.3, dtype=torch.float64), 1.2))
    opt_state = optimizer.init(weight)
    for value in (1.0, -1.0, -1.0, 1.0, 1.0):
        leaf.grad = torch.tensor(value)
        eager.step()
        weight, opt_state = optimizer.update(weight, torch.tensor(value), opt_state)
        assert_same(weight, leaf.detach())


@pytest.mark.parametrize("value", [torch.tensor(0.5), lambda applied: 0.5 + 0 * applied], ids=["tensor", "schedule"])
@pytest.mark.parametrize(
    ("cls", "name", "reason"),
    [
        (optim.SGD, "nesterov", "must be a bool, because it chooses the algorithm"),
        (optim.Adam, "amsgrad", "must be a bool, because it chooses the algorithm"),
        (optim.Adam, "maximize", "must be a bool, because it chooses the algorithm"),
        (optim.RMSprop, "centered", "must be a bool, because it chooses the algorithm"),
        (optim.NAdam, "decoupled_weight_decay", "must be a bool, because it chooses the algorithm"),
        (optim.Adam, "capturable", "must be a bool, because it chooses the algorithm"),
        (optim.Adam, "foreach", "must be False or None"),
        (optim.Muon, "ns_steps", "must be a constant"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_what_chooses_the_algorithm_is_refused_by_name(cls: Any, name: str, reason: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"stateless: {name} {reason}"):
        stateless(cls, **{name: value})


def test_a_schedule_may_return_a_number() -> None:
    params = parameters()
    results = []
    for momentum in (0.9, lambda applied: 0.9):
        optimizer = stateless(optim.SGD, lr=0.1, momentum=momentum)
        moved, opt_state = optimizer.update(params, gradients(0), optimizer.init(params))
        results.append(optimizer.update(moved, gradients(1), opt_state)[0])
    assert_close(results[0], results[1], 5e-7)


@pytest.mark.parametrize("value", [torch.tensor(True), torch.tensor(1j), torch.tensor(1)], ids=str)
def test_a_hyperparameter_that_is_no_real_number_is_named(value: Tensor) -> None:
    rule = r"must hold a float, as torch\.tensor\(1\.0\) does; got torch"
    with pytest.raises(TypeError, match=f"stateless: weight_decay {rule}"):
        stateless(optim.SGD, weight_decay=value)
    with pytest.raises(TypeError, match=rf"stateless: betas\[0\] {rule}"):
        stateless(optim.Adam, betas=(value, 0.999))


def test_a_hyperparameter_of_another_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"stateless: betas\[1\] must have shape \(\); got \(3,\)"):
        stateless(optim.AdamW, betas=(0.9, torch.ones(3)))
