"""The claim: a step that is put back leaves what a step that was not taken leaves; only what it may is selected."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import GradScaler
from funcamp._amp.undo import _KNOWN, _writes_grads, select
from tests.support.helpers import assert_same, clone

MODES = [None, "host", "select"]
Make = Callable[[list[Tensor]], torch.optim.Optimizer]
NUMBERS: dict[str, Any] = {"init_scale": 4.0}


def after(make: Make, params: list[Tensor], grads: list[list[Tensor | None]], scaler: Any) -> list[Any]:
    """Parameters, gradients and state after each step on these gradients; lr halves between them."""
    optimizer = make(params)
    seen = []
    scaler.scale(torch.zeros(()))
    for step in grads:
        for param, grad in zip(params, step):
            param.grad = None if grad is None else grad.clone()
        scaler.step(optimizer)
        scaler.update()
        states = [{k: v for k, v in optimizer.state.get(p, {}).items() if v is not None} for p in params]
        seen.append(clone((params, [param.grad for param in params], states)))
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.5
    return seen


def assert_same_steps(make: Make, params: list[Tensor], grads: list[list[Tensor | None]], skip: Any) -> None:
    """Every step as torch's."""
    ours = after(make, clone_params(params), grads, GradScaler("cpu", skip=skip, **NUMBERS))
    theirs = after(make, clone_params(params), grads, torch.amp.GradScaler("cpu", **NUMBERS))
    for left, right in zip(ours, theirs):
        assert_same(left, right)


def clone_params(params: list[Tensor]) -> list[Tensor]:
    return [torch.nn.Parameter(param.detach().clone()) for param in params]


def rows(*values: float) -> Tensor:
    """A sparse gradient of a table of four rows, one of them twice."""
    spread = torch.tensor(values)[:, None].repeat(1, 2)
    return torch.sparse_coo_tensor(torch.tensor([[1, 1, 3]]), spread, (4, 2), check_invariants=False)


SPARSE: dict[str, Make] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "SGD momentum foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "SGD dampening": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.3),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "Adagrad foreach": lambda params: torch.optim.Adagrad(params, lr=0.1, foreach=True),
    "SparseAdam": lambda params: torch.optim.SparseAdam(params, lr=0.1),
}


@pytest.mark.parametrize("skip", MODES)
@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("overflows", [(True, False, True, False), (False, True, False)])
@pytest.mark.filterwarnings("ignore:GradScaler.step. a skipped step cannot be undone:UserWarning")
def test_sparse_gradients_of_every_class_that_takes_them_follow_torch(
    name: str, skip: Any, overflows: tuple[bool, ...]
) -> None:
    grads: list[list[Tensor | None]] = [[rows(4.0, 8.0, math.inf if bad else -2.0)] for bad in overflows]
    assert_same_steps(SPARSE[name], [torch.ones(4, 2)], grads, skip)


def test_a_sparse_momentum_is_read_for_with_its_reason() -> None:
    scaler, grads = GradScaler("cpu", skip="select", **NUMBERS), [[rows(1.0, 2.0, 3.0)]] * 2
    with pytest.warns(UserWarning, match="SGD keeps sparse tensors, whose sizes follow from the gradients"):
        after(SPARSE["SGD momentum"], clone_params([torch.ones(4, 2)]), list(map(list, grads)), scaler)


@pytest.mark.parametrize("skip", MODES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [False, True])
def test_a_batch_dropped_after_unscaling(skip: Any, fused: bool, bad: bool) -> None:
    scales = []
    for scaler in (GradScaler("cpu", skip=skip, **NUMBERS), torch.amp.GradScaler("cpu", **NUMBERS)):
        weight = torch.nn.Parameter(torch.ones(2))
        adamw = torch.optim.AdamW([weight], fused=fused)
        scaler.scale(weight.sum() * (math.inf if bad else 1.0)).backward()
        scaler.unscale_(adamw)
        adamw.zero_grad()
        scaler.step(adamw)
        scaler.update()
        assert weight.tolist() == [1.0, 1.0]
        scales.append(scaler.state_dict())
    assert scales[0] == scales[1]


ERRORS: dict[str, tuple[Make, Callable[[float], list[Tensor]], type[Exception]]] = {
    "Adafactor of an empty parameter": (
        lambda params: torch.optim.Adafactor(params),
        lambda size: [torch.full((2,), size), torch.zeros(0, 3)],
        ZeroDivisionError,
    ),
    "AdamW of a sparse gradient": (
        lambda params: torch.optim.AdamW(params),
        lambda size: [rows(1.0, 2.0, size)],
        RuntimeError,
    ),
    "Adam with capturable on a CPU": (
        lambda params: torch.optim.Adam(params, capturable=True),
        lambda size: [torch.full((2,), size)],
        AssertionError,
    ),
}


@pytest.mark.parametrize("skip", MODES)
@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.filterwarnings("ignore:GradScaler.step. a skipped step cannot be undone:UserWarning")
def test_a_step_that_is_skipped_raises_nothing(name: str, skip: Any) -> None:
    make, grads_of, error = ERRORS[name]
    raised, left = [], []
    for scaler in (GradScaler("cpu", skip=skip, **NUMBERS), torch.amp.GradScaler("cpu", **NUMBERS)):
        params = clone_params([torch.ones(grad.shape) for grad in grads_of(1.0)])
        optimizer = make(params)
        scaler.scale(torch.zeros(()))
        for size in (math.nan, 1.0):
            for param, grad in zip(params, grads_of(size)):
                param.grad = grad
            if math.isnan(size):
                assert scaler.step(optimizer) is None
                scaler.update()
                assert all((param == 1).all() for param in params)
        with pytest.raises(error) as caught:
            scaler.step(optimizer)
        raised.append(str(caught.value))
        left.append([param.detach() for param in params])
    assert raised[0] == raised[1]
    assert_same(*left)


@pytest.mark.parametrize("skip", MODES)
@pytest.mark.parametrize("cls", [torch.optim.Rprop, torch.optim.ASGD])
def test_a_learning_rate_that_is_state_is_that_of_the_first_applied_step(cls: Any, skip: Any) -> None:
    grads = [[torch.full((2,), size)] for size in (math.inf, 4.0, 8.0)]
    assert_same_steps(lambda params: cls(params, lr=0.1), [torch.ones(2)], list(map(list, grads)), skip)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_state_that_is_saved_before_the_first_applied_step_follows_torch(dtype: torch.dtype) -> None:
    """torch casts a state that is loaded, NAdam's product of momenta too, to its parameter's type."""
    results = []
    for scaler in (GradScaler("cpu", skip="select", **NUMBERS), torch.amp.GradScaler("cpu", **NUMBERS)):
        weight = torch.nn.Parameter(torch.ones(2, dtype=dtype))
        nadam = torch.optim.NAdam([weight], lr=0.1)
        scaler.scale(torch.zeros(()))
        for size in (math.inf, 4.0, 8.0):
            weight.grad = torch.full_like(weight, size)
            scaler.step(nadam)
            scaler.update()
            nadam.load_state_dict(nadam.state_dict())
        results.append((weight.detach(), dict(nadam.state[weight])))
    assert_same(*results)


@pytest.mark.parametrize("skip", MODES)
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_momentum_begins_with_the_gradient_itself(dtype: torch.dtype, foreach: bool, skip: Any) -> None:
    """-0.0 too; and torch rounds a bfloat16 momentum by whether all parameters have a buffer."""
    first = [torch.full((64,), math.inf), None, None]
    second = [torch.full((64,), -0.0), torch.linspace(-3, 3, 64), None]
    grads = [[None if g is None else g.to(dtype) for g in step] for step in (first, second, [*second[:2], first[1]])]
    grads.append([torch.linspace(-1, 5, 64).to(dtype)] * 3)
    params = [torch.ones(64).to(dtype)] * 3
    assert_same_steps(
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=foreach), params, list(map(list, grads)), skip
    )


@pytest.mark.parametrize("skip", MODES)
def test_gradients_of_a_skipped_step_stay_as_unscaled(skip: Any) -> None:
    """torch's nesterov with foreach=True adds the momentum into them."""
    grads = [[torch.ones(2), torch.ones(2) * size] for size in (1.0, math.inf, 2.0)]
    make: Make = lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=True)  # noqa: E731
    assert_same_steps(make, [torch.ones(2), torch.ones(2)], list(map(list, grads)), skip)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("cls", _KNOWN)
def test_no_other_class_writes_into_gradients(cls: Any, foreach: bool, dtype: torch.dtype) -> None:
    options = {} if cls is torch.optim.Muon else {"foreach": foreach}
    cases: list[dict[str, Any]] = [{}, {"weight_decay": 0.1}, {"maximize": True}, {"momentum": 0.9, "nesterov": True}]
    for more in cases:
        param = torch.nn.Parameter(torch.ones(3, 2).to(dtype))
        try:
            optimizer = cls([param], lr=0.1, **options, **more)
        except TypeError:
            continue
        for _ in range(3):
            param.grad = torch.linspace(-1, 1, 6).reshape(3, 2).to(dtype)
            version = param.grad._version
            optimizer.step()
            assert param.grad._version == version or _writes_grads(optimizer), (cls, more)


def test_a_flag_on_one_device_puts_back_all_devices() -> None:
    """torch adds the flags of all devices."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    sgd = torch.optim.SGD([weight], lr=0.1)
    flags = {torch.device("cpu"): torch.zeros(()), torch.device("cpu", 0): torch.ones(())}
    select(sgd, flags, sgd.step)
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("skip", MODES)
@pytest.mark.filterwarnings("ignore:GradScaler.step. a skipped step cannot be undone:UserWarning")
def test_a_sparse_parameter_is_stepped_or_skipped(skip: Any) -> None:
    """torch's own tests unscale them."""
    for size, expected in ((math.inf, 1.0), (4.0, 0.5)):
        weight = rows(1.0, 0.0, 1.0).coalesce()
        weight.grad = rows(0.0, size, size).coalesce()
        scaler = GradScaler("cpu", skip=skip, **NUMBERS)
        scaler.scale(torch.zeros(()))
        scaler.step(torch.optim.SGD([weight], lr=0.5))
        assert weight.to_dense()[1, 0] == expected


def test_what_is_no_parameters_state_stays() -> None:
    """A state may have entries of other keys, and of parameters that have left the groups."""
    weight, gone = clone_params([torch.ones(2), torch.ones(2)])
    sgd = torch.optim.SGD([weight], lr=0.5, momentum=0.9, dampening=0.5)
    other: Any = {"note": 1}
    other_keys: list[Any] = [gone, "all"]
    sgd.state.update(dict.fromkeys(other_keys, other))
    scaler = GradScaler("cpu", skip="select", **NUMBERS)
    scaler.scale(torch.zeros(()))
    weight.grad = torch.full((2,), math.inf)
    scaler.step(sgd)
    assert {key: sgd.state[key] for key in other_keys} == dict.fromkeys(other_keys, other)
