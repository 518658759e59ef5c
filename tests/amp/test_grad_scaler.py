"""The claim: `funcamp.GradScaler` is `torch.amp.GradScaler` bit for bit, without its host reads and unsafe steps.

Random loops are in test_grad_scaler_trajectories.py, the cases of torch's own tests in test_grad_scaler_upstream.py.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, optim

from funcamp import GradScaler, ScalerConfig, init, presets, to_state_dict, update
from tests.support.helpers import assert_same, clone
from tests.support.host_reads import host_reads
from tests.support.optimizers import CASES
from tests.support.oracle import flagged
from tests.support.torch_loop import ScaledLoop, randn_like

NUMBERS: dict[str, Any] = {"init_scale": 2.0**10, "growth_factor": 1.7, "backoff_factor": 0.3, "growth_interval": 3}
PARAMS = {"w": torch.linspace(-1, 1, 6).reshape(3, 2), "v": torch.ones(2, 2)}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = CASES | {
    "SGD-fused": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "AdamW-fused": (optim.AdamW, {"lr": 0.1, "fused": True}),
}


def made(cls: Any, **options: Any) -> Any:
    return cls("cpu", **NUMBERS, **options)


def around(scaler: Any, name: str = "SGD") -> ScaledLoop:
    cls, arguments = OPTIMIZERS[name]
    return ScaledLoop(scaler, cls, PARAMS, **arguments)


def gradients(overflows: bool) -> dict[str, Tensor]:
    grads = {name: grad * 100 for name, grad in randn_like(PARAMS).items()}
    if overflows:
        grads["v"][1, 0] = math.inf
    return grads


def full(size: float) -> dict[str, Tensor]:
    return {name: torch.full_like(param, size) for name, param in PARAMS.items()}


class Elsewhere(GradScaler):
    """Reports three other devices, one without an overflow: without skip, it does what it does on a GPU."""

    def _unscale_grads_(self, *args: Any) -> Any:
        (flag,) = super()._unscale_grads_(*args).values()
        return {torch.device("meta", index): flag * min(index, 1) for index in range(3)}


def with_a_reduced_flag(cls: Any) -> Any:
    """Return a class whose flags are reduced over ranks, of which another one overflows at some steps."""

    class Reduced(cls):  # type: ignore[misc]
        def _unscale_grads_(self, *args: Any) -> Any:
            flags = super()._unscale_grads_(*args)
            return {device: flag.clamp(min=float(self.other_overflows)) for device, flag in flags.items()}

    return Reduced


# as torch's


#: What is set before a step: in the end the scale is frozen, and then torch takes these intervals for never.
SET = {
    8: ("growth_factor", 3.0), 10: ("backoff_factor", 0.7), 12: ("growth_interval", 1), 15: ("growth_interval", 10**12),
    17: ("growth_interval", 0), 20: ("backoff_factor", 1.0), 21: ("growth_interval", 1), 22: ("growth_factor", 1.0),
}  # fmt: skip
#: The attributes that loops assign without a setter.
ASSIGNED = {3: ("_backoff_factor", 0.6), 6: ("_growth_interval", 2), 13: ("_growth_factor", 2.5)}


@pytest.mark.parametrize("skip", ["select", "host"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loop_is_torchs(name: str, skip: Any) -> None:
    loops = around(made(GradScaler, skip=skip), name), around(made(torch.amp.GradScaler), name)
    overflows = "XX.X...X.XX..X....X.X.X.."
    # torch's first state is not defined then: test_fused_momentum_starts_from_zeros_after_a_skip
    for step in range(2 * (name == "SGD-fused"), len(overflows)):
        grads, left = gradients(overflows[step] == "X"), []
        for loop in loops:
            if step in SET:
                setter, value = SET[step]
                getattr(loop.scaler, f"set_{setter}")(value)
            if step in ASSIGNED:
                setattr(loop.scaler, *ASSIGNED[step])
            if name == "AdamW-fused" and step == 6:
                loop.optimizer.grad_scale = torch.tensor(2.0)  # a further factor
            new_scale = {5: 3.0, 7: torch.tensor(2.0**12)}.get(step)
            params = loop.step(grads, max_norm=1.0 if step % 3 == 1 else None, new_scale=new_scale)
            left.append((params, loop.optimizer.state_dict()["state"], loop.scaler.state_dict()))
        assert_same(*left)


@pytest.mark.parametrize("name", ["AdamW", "AdamW-fused"])
def test_a_subclass_reduces_the_flag_in_the_method_that_torch_calls(name: str) -> None:
    loops = [around(made(with_a_reduced_flag(cls)), name) for cls in (GradScaler, torch.amp.GradScaler)]
    for step, other_overflows in enumerate([False, True, False, False, False, True, True, False]):
        grads, left = gradients(step == 3), []
        for loop in loops:
            loop.scaler.other_overflows = other_overflows
            params = loop.step(grads, max_norm=1.0 if step % 3 == 2 else None)
            left.append((params, loop.optimizer.state_dict()["state"], loop.scaler.state_dict()))
        assert_same(*left)


def test_signatures_and_defaults_are_torchs() -> None:
    for name, theirs in vars(torch.amp.GradScaler).items():
        if inspect.isfunction(theirs):
            ours = inspect.signature(getattr(GradScaler, name)).parameters
            expected = inspect.signature(theirs).parameters
            assert list(ours)[: len(expected)] == list(expected), name
            assert [ours[key].default for key in expected] == [p.default for p in expected.values()], name


def test_without_cuda_the_default_warns_and_disables() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available.  Disabling") as caught:
        assert not GradScaler().is_enabled()
    assert caught[0].filename == __file__


def test_what_a_disabled_one_returns_is_what_torchs_does() -> None:
    seen = []
    for cls in (GradScaler, torch.amp.GradScaler):
        scaler = cls("cpu", enabled=False)
        scaler.load_state_dict({})
        scaler.set_growth_interval(100)
        again = pickle.loads(pickle.dumps(scaler))
        state = again.state_dict(), again.get_scale(), again.get_growth_interval(), hasattr(again, "_growth_factor")
        seen.append((again.scale("anything"), again.is_enabled(), state))
    assert_same(*seen)
    assert GradScaler("cpu", enabled=False).metrics().scale == 1.0


def test_complex_empty_and_missing_gradients() -> None:
    params = {"wave": torch.ones(2) * 1j, "empty": torch.zeros(0, 3), "idle": torch.ones(2)}
    loop = ScaledLoop(GradScaler("cpu", init_scale=4.0, skip="select"), optim.SGD, params, lr=1.0)
    for value in (4 + 8j, complex(1, math.nan)):
        grads = {"wave": torch.full((2,), value), "empty": torch.zeros(0, 3), "idle": None}
        assert loop.step(grads)["wave"].tolist() == [-1 - 1j] * 2
    assert loop.scaler.get_scale() == 2.0


# beyond torch's: another rule, float16, metrics


@pytest.mark.parametrize("preset", [presets.megatron, presets.flax])
def test_another_rule_moves_the_scale_and_its_counters_are_saved(preset: Callable[[], ScalerConfig]) -> None:
    config = preset()
    loop, state = around(GradScaler("cpu", config=config)), init(config)
    for overflows in (True, True, False, True, False, False, True, True):
        state = update(flagged(state, overflows), config)
        loop.step(gradients(overflows))
        assert loop.scaler.state_dict() == to_state_dict(state, config)
        again = GradScaler("cpu", config=config)
        again.load_state_dict(loop.scaler.state_dict())
        loop.scaler = copy.deepcopy(again)
        loop.scaler.scale(torch.zeros(()))


def test_the_scale_stays_within_its_bounds() -> None:
    loop = around(GradScaler("cpu", config=ScalerConfig(4.0, min_scale=2.0, max_scale=8.0)))
    # torch promises a new scale of shape (1,), and raises
    for new_scale, expected in ((None, 2.0), (None, 2.0), (100.0, 8.0), (torch.tensor([100.0]), 8.0)):
        loop.step(gradients(True), new_scale=new_scale)
        assert loop.scaler.get_scale() == expected


def test_float16_gradients_are_unscaled_in_float32_if_asked() -> None:
    scaler = GradScaler("cpu", init_scale=2.0**26, allow_fp16=True)  # its reciprocal is 0 in float16
    grad = torch.tensor([60000.0, -1.0, 3.0, 2.0**10]).half()
    loop = ScaledLoop(scaler, optim.SGD, {"w": torch.zeros(4).half()}, lr=1.0)
    for new_scale in (2.0**-10, None):  # 60000 * 2**10 is not finite in float16
        assert_same(loop.step({"w": grad}, new_scale=new_scale)["w"], -(grad.float() * 2.0**-26).half())
    assert scaler.metrics().found_inf == 1.0


@pytest.mark.parametrize("skip", [None, "host", "select"])
def test_metrics_are_copies_of_this_steps_numbers(skip: Any) -> None:
    scaler = made(GradScaler, skip=skip)
    scaler.load_state_dict(scaler.state_dict() | {"scale": 32.0, "_growth_tracker": 1})
    rows = [scaler.metrics()]  # before the first scale
    loop = around(scaler)
    for overflows in (False, True, False):
        loop.put(gradients(overflows))
        for call in (scaler.unscale_, scaler.step):
            call(loop.optimizer)
            assert scaler.metrics().found_inf == overflows
        scaler.update()
        rows.append(scaler.metrics())
    expected = [[32.0, 1, 0], [32.0, 2, 0], [pytest.approx(9.6), 0, 1], [pytest.approx(9.6), 1, 0]]
    assert [[number.item() for number in row] for row in rows] == expected


# safer than torch's: each with what torch does, so that a difference that ends can leave the docstring


@pytest.mark.parametrize("name", ["SGD", "AdamW", "AdamW-fused"])
@pytest.mark.parametrize("scale", [0.0, 2.0**-149, 2.0**-128, 2.0**-60, math.inf, math.nan])
def test_nothing_infinite_reaches_an_optimizer_at_any_scale(name: str, scale: float) -> None:
    loop = around(GradScaler("cpu", skip="select"), name)
    for size in (2.0**100, 2.0**-120, 0.0):
        loop.scaler.update(scale)
        assert all(param.isfinite().all() for param in loop.step(full(size)).values()), size


def test_flags_of_several_devices_are_one_flag() -> None:
    given = []
    loop = around(Elsewhere("cpu"), "AdamW-fused")
    loop.optimizer.register_step_pre_hook(lambda optimizer, *_: given.append(optimizer.found_inf.item()))
    for overflows in (True, False):
        loop.step(gradients(overflows), max_norm=1.0)
        assert loop.scaler.metrics().found_inf == given[-1] == overflows


def test_fused_momentum_starts_from_zeros_after_a_skip() -> None:
    torch.use_deterministic_algorithms(True)  # fills memory that nobody wrote with NaN, so that it shows
    try:
        left = []
        for cls, fused in ((GradScaler, True), (torch.amp.GradScaler, False), (torch.amp.GradScaler, True)):
            loop = ScaledLoop(made(cls), optim.SGD, PARAMS, lr=0.1, momentum=0.9, dampening=0.3, fused=fused)
            left.append([loop.step(full(size)) for size in (math.inf, 3.0, 4.0)][-1])
    finally:
        torch.use_deterministic_algorithms(False)
    ours, not_fused, fused_by_torch = left
    assert_same(ours, not_fused)
    assert all(param.isnan().all() for param in fused_by_torch.values())


# how a step is skipped


#: Reads of a step until the optimizer has its state, and of a later one. On a CPU the scale is read unless it selects.
READS: dict[tuple[str, str], tuple[Any, int, int]] = {
    ("SGD", "torch"): (torch.amp.GradScaler, 1, 1),
    ("SGD", "default"): (GradScaler, 2, 2),
    ("AdamW-fused", "default"): (GradScaler, 1, 1),
    ("SGD", "on a GPU"): (Elsewhere, 1, 1),
} | {
    (name, "select"): (functools.partial(GradScaler, skip="select"), first, 0)
    for name, first in {"SGD": 0, "AdamW-fused": 0, "SGD-momentum": 1, "SGD-fused": 1, "Muon": 1}.items()
}


@pytest.mark.parametrize("case", READS, ids="-".join)
def test_the_flag_is_read_only_if_asked_on_a_cpu_or_at_the_step_that_makes_the_state(case: tuple[str, str]) -> None:
    make, first, later = READS[case]
    loop = around(make("cpu"), case[0])
    optim.lr_scheduler.StepLR(loop.optimizer, 1)  # which may see a step that is undone
    for step, expected in enumerate((first, first, later, later)):
        grads = gradients(step in (0, 2))
        with host_reads() as reads:
            loop.step(grads, max_norm=1.0 if step % 2 else None)
        assert len(reads) == expected, reads


class Own(optim.SGD):
    """No class of torch's."""


class Named(torch.nn.Parameter):
    """No class of torch's."""


SPARSE = torch.sparse_coo_tensor(torch.tensor([[1, 3]]), torch.ones(2, 2), (4, 2), check_invariants=False)
#: An optimizer, a parameter, its gradient, and the reason for which the step is not undone.
READ_FOR: list[tuple[Callable[[list[Tensor]], Any], Tensor, Tensor, str]] = [
    (Own, torch.ones(2), torch.ones(2), "Own is no class of torch.optim's own"),
    (optim.SparseAdam, torch.ones(4, 2), SPARSE, "SparseAdam takes steps whose size follows from values"),
    (functools.partial(optim.SGD, momentum=0.9), torch.ones(4, 2), SPARSE, "SGD keeps sparse tensors, whose sizes"),
    (optim.SGD, Named(torch.ones(2)), torch.ones(2), "a parameter is a Named"),
    (optim.SGD, SPARSE.clone(), SPARSE, "a parameter is sparse"),
]


@pytest.mark.parametrize(("cls", "param", "grad", "reason"), READ_FOR)
def test_the_flag_of_a_step_that_cannot_be_undone_is_read_with_the_reason(
    cls: Any, param: Tensor, grad: Tensor, reason: str
) -> None:
    optimizer = cls([param.requires_grad_()])
    param.grad = grad.clone()
    optimizer.step()
    before = clone((param, optimizer.state_dict()["state"]))
    scaler = made(GradScaler, skip="select")
    scaler.scale(torch.zeros(()))
    param.grad = grad * math.inf
    with pytest.warns(UserWarning, match=reason):
        scaler.step(optimizer)
    assert_same(clone((param, optimizer.state_dict()["state"])), before)


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize(("skip", "calls"), [(None, 1), ("host", 1), ("select", 2)])
def test_a_hook_or_a_replaced_step_sees_no_step_that_is_undone_unless_asked_to(
    skip: Any, calls: int, replaces: bool
) -> None:
    loop, seen = around(Elsewhere("cpu", skip=skip)), mock.Mock(spec=[], return_value=None)
    if replaces:  # as Accelerate does
        seen.side_effect = loop.optimizer.step
        loop.optimizer.step = seen
    else:
        loop.optimizer.register_step_post_hook(seen)
    for overflows in (True, False):
        loop.step(gradients(overflows))
    assert seen.call_count == calls


@pytest.mark.parametrize(("name", "warns"), [("SGD", True), ("AdamW-fused", False)])
def test_a_closure_that_scales_is_warned_of_if_nothing_unscales_it(name: str, warns: bool) -> None:
    loop = around(made(GradScaler), name)
    loop.put(full(1.0))
    with pytest.warns(UserWarning, match="called in the closure of step") if warns else contextlib.nullcontext():
        loop.scaler.step(loop.optimizer, lambda: loop.scaler.scale(loop.leaves["w"].sum()).backward())
    loop.scaler.scale(torch.zeros(()))


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
@pytest.mark.parametrize("skip", ["select", "host"])
def test_a_compiled_loop_breaks_its_graph_at_the_scaler_and_follows_the_eager_one(skip: Any) -> None:
    # contract: "the drop-in `GradScaler` inside a graph of Dynamo (`fullgraph=True`)"
    scaler = made(GradScaler, skip=skip)
    eager, compiled = (around(copy.deepcopy(scaler), "SGD-momentum") for _ in range(2))

    def iterate(loop: ScaledLoop, size: Tensor) -> None:
        loop.optimizer.zero_grad()
        loop.scaler.scale((loop.leaves["w"] * size).square().sum()).backward()
        loop.step({"w": loop.leaves["w"].grad, "v": None}, max_norm=0.1)

    for size in torch.tensor([1.0, 1e38, 2.0, 3.0, 4.0]):
        iterate(eager, size)
        torch.compile(iterate, backend="eager")(compiled, size)
        assert_same((compiled.params(), compiled.scaler.state_dict()), (eager.params(), eager.scaler.state_dict()))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="GradScaler"):
        torch.compile(lambda loss: scaler.scale(loss), backend="eager", fullgraph=True)(torch.ones(()))
