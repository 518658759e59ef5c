"""Optimizers whose step as a function was once another than their own, without an error: now equal, or refused."""

from __future__ import annotations

import contextlib
import math
import queue
import random
import statistics
import time
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from funcamp import jit, schedule, stateless
from funcamp._trace.host_generators import host_generators, states_of
from tests.support.helpers import assert_close, assert_same
from tests.support.torch_loop import TorchLoop, linear_step, randn_like

#: A weight and its bias follow each other, and two parameters have the same shape.
SHAPES = {"w": (8, 16), "b": (8,), "v": (8, 16), "c": (4,), "s": (4,), "t": (4,)}
STEPS = 22
#: In this step gradients are large.
LARGE_STEP = 9


def parameters(shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def assert_follows(
    cls: Any,
    optimizer: Any,
    attach: Callable[[Any], Any] | None = None,
    *,
    flat: bool,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
) -> None:
    """Assert that steps of an optimizer are those of torch's loop with its class, from large gradients on too."""
    params = parameters(shapes)
    step = linear_step(optimizer)
    state = step.init(params, flat=flat)
    loop = TorchLoop(cls, params)
    scheduler = None if attach is None else attach(loop.optimizer)
    for number in range(STEPS):
        grads = {name: grad * (30.0 if number == LARGE_STEP else 1.0) for name, grad in randn_like(params).items()}
        state, _ = step(state, grads)
        loop.step(grads)
        if scheduler is not None:
            scheduler.step()
        assert_close(state.params.tree(), loop.params(), 1e-5)


class Descends(torch.optim.Optimizer):
    """Steps by `rate` times the gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "t": 0})

    def rate(self, group: dict[str, Any]) -> Any:
        """Return the rate of a step; `t` is its number, 1 for the first."""
        return group["lr"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        group["t"] += 1
        self.move(group, self.rate(group))

    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            p.sub_(p.grad, alpha=rate)

    def total_norms(self) -> list[float]:
        return [p.grad.norm().item() for p in self.param_groups[0]["params"]]


# Numbers of numpy.


class NumpyMilestones(Descends):
    def rate(self, group: dict[str, Any]) -> Any:
        return group["lr"] * (0.1 if group["t"] in np.array([15, 20]) else 1.0)


class NumpyRestart(Descends):
    def rate(self, group: dict[str, Any]) -> Any:
        is_restart = group["t"] == np.int64(15)
        if group["t"] != np.int32(17):
            group["lr"] *= 0.99
        return group["lr"] * (np.int64(2) if is_restart else np.float32(0.5)) * (group["t"] < np.int64(18))


# State under other names and in other places.


class KeysOfState(Descends):
    def rate(self, group: dict[str, Any]) -> Any:
        states: Any = self.state
        counts = [states[0], states["all", 1], states[None]]
        for count in counts:
            count["t"] = count.get("t", 0) + 1
        return group["lr"] * (0.1 if counts[0]["t"] + counts[1]["t"] + counts[2]["t"] > 45 else 1.0)

    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            mean = self.state[p].setdefault(0, torch.zeros_like(p)).lerp_(p.grad, 0.1)
            p.sub_(mean if group["t"] > 15 else p.grad, alpha=rate)


class Counts(Descends):
    """Counts in an attribute, too."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.count = 0

    def rate(self, group: dict[str, Any]) -> Any:
        self.count += 1
        return group["lr"] * (0.1 if self.count > 15 else 1.0)


class WrapsCounts(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.base = Counts(params, lr)
        self.param_groups, self.state, self.defaults = self.base.param_groups, self.base.state, self.base.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


class SwitchesLate(torch.optim.Optimizer):
    """Has two optimizers in a list."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        params = list(params)
        super().__init__(params, {"lr": lr})
        self.inner, self.count = [torch.optim.SGD(params, lr=lr), torch.optim.Adam(params, lr=lr)], 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        self.inner[0 if self.count <= 15 else 1].step()


class ChoosesStep(Descends):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.step = self.step_by_sign  # type: ignore[method-assign]

    @torch.no_grad()
    def step_by_sign(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad.sign(), alpha=0.1)


class NamesOfFuncamp(Descends):
    def rate(self, group: dict[str, Any]) -> Any:
        group["stage"] = group.get("stage", 0) + (group["t"] > 15)
        return group["lr"] * 0.5 ** group["stage"]

    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            self.state[p]["applied"] = self.state[p].get("applied", 0) + 1
            p.sub_(p.grad, alpha=rate / self.state[p]["applied"])


class Velocities(Descends):
    """Has a list with a tensor for each parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.velocities = self.zeros()

    def zeros(self) -> list[torch.Tensor]:
        return [torch.zeros_like(p) for p in self.param_groups[0]["params"]]

    def move(self, group: dict[str, Any], rate: Any) -> None:
        if not self.velocities:
            self.velocities = Velocities.zeros(self)
        for p, velocity in zip(group["params"], self.velocities):
            p.sub_(velocity.mul_(0.9).add_(p.grad), alpha=rate)


class LateVelocities(Velocities):
    """Makes the list in its first step."""

    def zeros(self) -> list[torch.Tensor]:
        return []


class Rings(Descends):
    """Keeps the last four gradients, and reads the oldest one."""

    def move(self, group: dict[str, Any], rate: Any) -> None:
        place = (group["t"] - 1) % 4
        for p in group["params"]:
            state = self.state[p]
            ring = state.setdefault("ring", torch.zeros(4, *p.shape, dtype=p.dtype, device=p.device))
            ring[place] = p.grad
            p.sub_(ring.mean(0) + ring[group["t"] % 4], alpha=rate)


class LerpsWithRate(Descends):
    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            p.sub_(mean.lerp_(rate * p.grad, 0.1))


# What depends on the gradients' size.


class ClipsByFsum(Descends):
    def rate(self, group: dict[str, Any]) -> Any:
        total = math.fsum(self.total_norms())
        return group["lr"] * (100.0 / total if total > 100.0 else 1.0)


class ClipsByFirst(Descends):
    """Clips by the norm of the first gradient, which is at least 50."""

    def rate(self, group: dict[str, Any]) -> Any:
        norm = sum(self.total_norms())
        if "clip" not in group:
            group["clip"] = max(norm, 50.0)
        return group["lr"] * min(1.0, group["clip"] / norm)


class DividesInTry(Descends):
    def rate(self, group: dict[str, Any]) -> Any:
        try:
            return group["lr"] * abs(1.0 / (group["t"] - 20))
        except Exception:
            return group["lr"]


class DividesUnnamed(Descends):
    def rate(self, group: dict[str, Any]) -> Any:
        with contextlib.suppress(ArithmeticError):
            return group["lr"] * abs(1.0 / (group["t"] - 20))
        return group["lr"]


# What goes by the places, the sizes or the number of the parameters.


class ByHiddenSize(Descends):
    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            p.sub_(p.grad * torch.tensor(float(p.numel())).rsqrt().to(p), alpha=rate)


class ByListOfSizes(Descends):
    def move(self, group: dict[str, Any], rate: Any) -> None:
        params = group["params"]
        updates = torch._foreach_div([p.grad for p in params], [p.numel() for p in params])
        torch._foreach_add_(params, updates, alpha=-0.1)


class DecaysFirst(Descends):
    def move(self, group: dict[str, Any], rate: Any) -> None:
        for index, p in enumerate(group["params"]):
            if index == 0 or (index < 4 and group["t"] > 15):
                p.mul_(0.9)
            p.sub_(p.grad, alpha=rate)


class BiasAfterWeight(Descends):
    """A bias after its weight has twice the rate."""

    def move(self, group: dict[str, Any], rate: Any) -> None:
        before = None
        for p in group["params"]:
            is_bias = before is not None and before.ndim == 2 and p.shape == before.shape[:1]
            p.sub_(p.grad, alpha=rate * (2 if is_bias else 1))
            before = p


class LooksUpInTable(Descends):
    """Keeps its last ten rates in a table, as RAdam does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.param_groups[0]["table"] = [[None, None] for _ in range(10)]

    def rate(self, group: dict[str, Any]) -> Any:
        row = group["table"][int(group["t"] % 10)]
        if group["t"] != row[0]:
            row[0] = group["t"]
            row[1] = group["lr"] / math.sqrt(group["t"]) if group["t"] > 5 else group["lr"]
        return row[1]


class CallsAsOfOld(Descends):
    """Gives the factor before the tensors, as torch 1.4 wanted it, and computes in float32."""

    def rate(self, group: dict[str, Any]) -> Any:
        return group["lr"] / math.sqrt(group["t"])

    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p, dtype=torch.float32))
            mean.mul_(0.9).add_(rate, p.grad.float())
            moved = p.float().addcdiv_(-rate, mean, mean.abs() + 1)
            p.copy_(moved.addcmul_(rate, mean, mean))


class RaisesForNaN(Descends):
    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            if torch.isnan(p.grad).any() or torch.isinf(p.grad).any():
                raise FloatingPointError("a gradient is not finite")
        super().move(group, rate)


class RaisesForNorm(Descends):
    """Looks at the norm only from the sixth step on, which also has another rate."""

    def rate(self, group: dict[str, Any]) -> Any:
        if group["t"] < 6:
            return group["lr"]
        norm = sum(self.total_norms())
        if norm != norm:
            raise FloatingPointError("the norm is NaN")
        return group["lr"] / 2


RIGHT = [
    *(NumpyMilestones, NumpyRestart, KeysOfState, WrapsCounts, SwitchesLate, ChoosesStep, NamesOfFuncamp),
    *(ClipsByFsum, ClipsByFirst, DividesInTry, DividesUnnamed),
    *(Velocities, LateVelocities, Rings),
    *(ByHiddenSize, ByListOfSizes, DecaysFirst, BiasAfterWeight),
    *(LooksUpInTable, CallsAsOfOld, RaisesForNaN, RaisesForNorm),
]


# torch warns of the old order.
@pytest.mark.filterwarnings(r"ignore:(?s)This overload of:UserWarning")
@pytest.mark.parametrize("flat", [False, True], ids=["per_tensor", "flat"])
@pytest.mark.parametrize("cls", RIGHT, ids=lambda cls: cls.__name__)
def test_a_class_follows_its_own_loop(cls: Any, flat: bool) -> None:
    assert_follows(cls, stateless(cls), flat=flat)


class CorrectsInPlace(Descends):
    """Writes into what it computes from a parameter of shape () and a count."""

    def rate(self, group: dict[str, Any]) -> Any:
        return 1 - 0.9 ** group["t"]

    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            update = p.grad.div(rate)
            update.mul_(rate).add_(p, alpha=rate).div_(rate + 1)
            p.sub_(update, alpha=0.1)


@pytest.mark.inductor
def test_a_class_that_writes_into_scalars_compiles() -> None:
    params = {"w": torch.randn(3), "s": torch.tensor(1.5)}
    step = linear_step(stateless(CorrectsInPlace))
    run, state = jit(step), step.init(params)
    loop = TorchLoop(CorrectsInPlace, params)
    for _ in range(3):
        grads = randn_like(params)
        state, _ = run(state, grads)
        loop.step(grads)
        assert_close(state.params.tree(), loop.params(), 1e-5)


# Classes that are refused.


class StepsAScheduler(Descends):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self, 15)

    def move(self, group: dict[str, Any], rate: Any) -> None:
        super().move(group, rate)
        self.scheduler.step()


class StepsAHelper(Descends):
    """Its helper holds the optimizer."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.helper = types.SimpleNamespace(optimizer=self, count=0)

    def rate(self, group: dict[str, Any]) -> Any:
        self.helper.count += 1
        return group["lr"]


class DrawsRarely(Descends):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.random = self.generator()

    def generator(self) -> Any:
        return random.Random(0)

    def rate(self, group: dict[str, Any]) -> Any:
        return group["lr"] * (self.random.random() if group["t"] > 15 else 1.0)


class DrawsRarelyByNumpy(DrawsRarely):
    def generator(self) -> Any:
        return np.random.default_rng(0)


class KeepsWeakly(Descends):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.slow = WeakTensorKeyDictionary()

    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            if p not in self.slow:
                self.slow[p] = p.clone()
            p.sub_(p.grad + (p - self.slow[p]) * (group["t"] > 15), alpha=0.1)


class Queues(Descends):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.queue: queue.Queue[int] = queue.Queue()

    def rate(self, group: dict[str, Any]) -> Any:
        self.queue.put(1)
        return group["lr"] * (0.1 if self.queue.qsize() > 15 else 1.0)


class ReadsClock(Descends):
    def rate(self, group: dict[str, Any]) -> Any:
        start = group.setdefault("start", time.monotonic())
        return group["lr"] * max(0.0, 1 - (time.monotonic() - start) / 3600)


class LooksUp(Descends):
    """Catches every error, also one of funcamp."""

    def rate(self, group: dict[str, Any]) -> Any:
        try:
            return {15: 0.01}[group["t"]]
        except:  # noqa: E722  what is tested
            return group["lr"]


class RootInTry(Descends):
    def rate(self, group: dict[str, Any]) -> Any:
        try:
            return math.sqrt(20 - group["t"]) * 0.01
        except Exception:
            return 0.0


class FactorsInTry(Descends):
    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            update = p.grad
            if p.ndim == 2:
                try:
                    update = torch.linalg.cholesky(p.grad @ p.grad.T) @ p.grad
                except RuntimeError:
                    update = p.grad / (1 + p.grad.norm())
            p.sub_(update, alpha=rate)


class ComparesMean(Descends):
    def rate(self, group: dict[str, Any]) -> Any:
        return 0.0 if statistics.fmean(self.total_norms()) > 30 else group["lr"]


class ScalesByMask(Descends):
    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            grad = p.grad.clone()
            grad[grad.abs() > 1] *= 0.1
            p.sub_(grad, alpha=rate)


class Warns(Descends):
    def rate(self, group: dict[str, Any]) -> Any:
        if group["t"] % 100 == 0:
            warnings.warn(f"step {group['t']}", stacklevel=1)
        return group["lr"]


class ComparesText(Descends):
    def rate(self, group: dict[str, Any]) -> Any:
        return 0.0 if float("%.1f" % sum(self.total_norms())) > 100 else group["lr"]  # noqa: UP031  as C reads it


class ComparesComplex(Descends):
    def rate(self, group: dict[str, Any]) -> Any:
        return group["lr"] * (0.1 if group["t"] == 15 + 0j else 1.0)


class TwoNames(Descends):
    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            state = self.state[p]
            if not state:
                state["read"] = state["written"] = torch.zeros_like(p)
            state["written"].lerp_(p.grad, 0.1)
            p.sub_(state["read"] if group["t"] > 16 else p.grad, alpha=rate)


class CountsUpdates(Descends):
    """Counts in the loop over the parameters, and clips each."""

    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            group["updates"] = group.get("updates", 0) + 1
            grad = p.grad / p.grad.norm() if p.grad.norm() > 1 else p.grad
            p.sub_(grad, alpha=0.1 if group["updates"] < 5000 else 0.01)


class KeepsRatesInTable(LooksUpInTable):
    """Uses the rate of ten steps ago, too."""

    def rate(self, group: dict[str, Any]) -> Any:
        row = group["table"][int(group["t"] % 10)]
        former = 0.0 if row[0] is None else row[0]
        row[0] = group["lr"] / group["t"]
        return row[0] + former


REFUSED = [
    (StepsAScheduler, r"its step changes self\.scheduler\.last_epoch, where it is not followed"),
    (StepsAHelper, r"its step changes self\.helper\.count, where it is not followed"),
    (DrawsRarely, r"its step changes self\.random \(its state\)|some step of it changes self\.random"),
    (DrawsRarelyByNumpy, r"its step changes self\.random \(its state\)|some step of it changes self\.random"),
    (KeepsWeakly, r"its step changes the keys of self\.slow\.data, where it is not followed"),
    (Queues, r"its step changes len\(self\.queue\.queue\), where it is not followed"),
    (ReadsClock, r"it reads time\.monotonic, which a compiled program would repeat"),
    (LooksUp, "its step reads a value in Python"),
    (RootInTry, "its rate may catch Exception of math"),
    (FactorsInTry, "its move may catch RuntimeError of cholesky, .* torch.linalg.cholesky_ex"),
    (ComparesMean, "its step gives a number that changes in training to a function in C"),
    (ScalesByMask, r"its step selects elements by their values \(x\[mask\], nonzero\), .* use torch.where"),
    (Warns, "its step writes its value into a text in Python: .*'t'"),
    (ComparesText, "its step gives a number that changes in training to a function in C"),
    (ComparesComplex, "its step compares it with a complex in Python"),
    (KeepsRatesInTable, "come to other numbers than its own"),
    (TwoNames, "come to other numbers than its own: .* one tensor under two names"),
    (CountsUpdates, "its step branches on numbers that change in training in more than 16 ways"),
]


@pytest.mark.parametrize(("cls", "reason"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_class_that_a_step_as_a_function_does_not_follow_is_refused(cls: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=f"(?s)stateless: {cls.__name__} cannot be made pure: .*({reason})"):
        stateless(cls)


# A schedule changes the parameter group only, as in torch.


class DecaysByDefaults(Descends):
    def rate(self, group: dict[str, Any]) -> Any:
        return group["lr"] * group["lr"] / self.defaults["lr"]


class DecaysByInitial(Descends):
    def rate(self, group: dict[str, Any]) -> Any:
        return group["lr"] * group["lr"] / group.get("initial_lr", group["lr"])


class KeepsRate(Descends):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.kept = types.SimpleNamespace(lr=lr)

    def rate(self, group: dict[str, Any]) -> Any:
        return group["lr"] + self.kept.lr


class KeepsRateInTensor(KeepsRate):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.kept = types.SimpleNamespace(lr=torch.tensor(lr).item())


class KeepsRateInClosure(Descends):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.rule = lambda t: lr * min(1.0, t / 5)

    def rate(self, group: dict[str, Any]) -> Any:
        return group["lr"] + self.rule(group["t"])


USE_THE_FIRST_RATE = [DecaysByDefaults, KeepsRate, KeepsRateInTensor, KeepsRateInClosure]


def halving(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)


@pytest.mark.parametrize("cls", [DecaysByInitial, LerpsWithRate, *USE_THE_FIRST_RATE], ids=lambda cls: cls.__name__)
def test_a_scheduler_changes_the_group_only(cls: Any) -> None:
    optimizer = schedule(stateless(cls, lr=0.1), halving, steps=STEPS)
    assert_follows(cls, optimizer, halving, flat=True)


@pytest.mark.parametrize("cls", USE_THE_FIRST_RATE, ids=lambda cls: cls.__name__)
def test_a_schedule_of_a_class_that_uses_the_number_of_its_constructor_is_refused(cls: Any) -> None:
    with pytest.raises(TypeError, match=r"stateless: lr must be a number, because .* the number that its constructor"):
        stateless(cls, lr=lambda applied: 0.1 / (1 + applied))


class DrawsByGradient(Descends):
    """Takes a part of the gradients, the large ones more probably."""

    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            probability = p.grad.abs() / p.grad.abs().max()
            p.sub_(p.grad * torch.bernoulli(probability), alpha=rate)


class DividesBySpectralNorm(Descends):
    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            p.sub_(p.grad / (torch.linalg.matrix_norm(p.grad, 2) if p.ndim == 2 else p.grad.norm()), alpha=rate)


@pytest.mark.compiled
@pytest.mark.parametrize("cls", [DividesBySpectralNorm, DrawsByGradient])
def test_a_step_that_overflows_is_skipped_although_a_function_in_it_would_raise(cls: Any) -> None:
    step = linear_step(stateless(cls))
    params = {"w": torch.ones(4, 4)}
    state, metrics = jit(step, backend="eager")(step.init(params), {"w": torch.full((4, 4), torch.inf)})
    assert metrics.found_inf
    assert_close(state.params.tree(), {"w": torch.ones(4, 4)}, 0.0)


class SortsIntoOptimizers(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        params = list(params)
        super().__init__(params, {"lr": lr})
        self.matrices = torch.optim.SGD([p for p in params if p.ndim >= 2], lr=lr)
        self.vectors = torch.optim.Adam([p for p in params if p.ndim < 2], lr=lr)


def test_a_class_that_is_made_for_several_kinds_of_parameters_is_refused() -> None:
    with pytest.raises(TypeError, match=r"its constructor fails for one parameter \(.* empty .*by_group"):
        stateless(SortsIntoOptimizers)


class SolvesSingularly(Descends):
    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            matrix = p.grad @ p.grad.T if p.ndim == 2 else torch.ones(1, 1)
            p.sub_(p.grad * torch.linalg.solve(matrix, matrix).mean(), alpha=rate)


def test_an_error_of_a_trial_is_a_refusal() -> None:
    with pytest.raises(TypeError, match="SolvesSingularly cannot be made pure: its step"):
        stateless(SolvesSingularly)


def test_a_trial_leaves_the_generators_as_they_were() -> None:
    before = states_of(host_generators()), torch.get_rng_state().tolist()
    with contextlib.suppress(TypeError):
        stateless(DrawsOfAll)
    assert before == (states_of(host_generators()), torch.get_rng_state().tolist())


class DrawsOfAll(Descends):
    def rate(self, group: dict[str, Any]) -> Any:
        return group["lr"] * (random.random() + np.random.random()) * torch.rand(()).item()


# What a class does in another dtype than that of its first trial.


class RoundsStochastically(Descends):
    """Rounds bfloat16 parameters up or down by chance, a separate draw for each parameter."""

    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            if p.dtype != torch.bfloat16:
                p.sub_(p.grad, alpha=rate)
                continue
            exact = p.float() - rate * p.grad.float()
            bits = exact.view(torch.int32) + torch.randint_like(exact, 0, 1 << 16, dtype=torch.int32)
            p.copy_((bits & -65536).view(torch.float32))


class WarmsUpAndRounds(RoundsStochastically):
    def rate(self, group: dict[str, Any]) -> Any:
        return group["lr"] if group["t"] > 5 else group["lr"] / 2


_last_updates: dict[int, torch.Tensor] = {}


class KeepsElsewhereInHalf(Descends):
    """Adds the last update once more in bfloat16, which it keeps in a global variable."""

    def move(self, group: dict[str, Any], rate: Any) -> None:
        for number, p in enumerate(group["params"]):
            update = rate * p.grad
            p.sub_(update)
            if p.dtype == torch.bfloat16:
                if group["t"] > 1:
                    p.sub_(_last_updates[number])
                _last_updates[number] = update.clone()


class NormalizesInHalf(Descends):
    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            p.sub_(p.grad / p.grad.norm() if p.dtype == torch.bfloat16 else p.grad, alpha=rate)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("cls", [RoundsStochastically, NormalizesInHalf])
def test_a_class_that_does_otherwise_in_half_precision_follows_its_own_loop(cls: Any, flat: bool) -> None:
    params = {name: value.bfloat16() for name, value in parameters().items()}
    step = linear_step(stateless(cls))
    state = step.init(params, flat=flat)
    loop = TorchLoop(cls, params)
    for _ in range(5):
        grads = {name: grad.bfloat16() for name, grad in randn_like(params).items()}
        torch.manual_seed(1)
        state, _ = step(state, grads)
        torch.manual_seed(1)
        loop.step(grads)
        assert_same(state.params.tree(), loop.params())


@pytest.mark.parametrize(
    ("cls", "reason"),
    [(WarmsUpAndRounds, "draws random numbers, and branches"), (KeepsElsewhereInHalf, "in torch.bfloat16 its steps")],
)
def test_a_class_that_is_not_followed_in_half_precision_is_refused_there(cls: Any, reason: str) -> None:
    optimizer = stateless(cls)
    params = parameters()
    optimizer.init(params)
    with pytest.raises(TypeError, match=reason):
        optimizer.init({name: value.bfloat16() for name, value in params.items()})


# What a class does with other parameters than those of its first trial: more of them, other shapes.

#: A convolution in one dimension, a square matrix and a large one, and more parameters than in the trial.
OTHER_SHAPES = {"c": (4, 2, 5), "q": (6, 6), "w": (40, 24), **{f"b{number}": (3,) for number in range(9)}}


class SlowsFirst(Descends):
    """The first eight parameters have a smaller rate."""

    def move(self, group: dict[str, Any], rate: Any) -> None:
        for number, p in enumerate(group["params"]):
            p.sub_(p.grad, alpha=rate * (0.1 if number < 8 else 1.0))


class BeginsByPlace(Descends):
    """Its state depends on the place of the parameter."""

    def move(self, group: dict[str, Any], rate: Any) -> None:
        for number, p in enumerate(group["params"]):
            state = self.state[p]
            if not state:
                state["mean"] = torch.full_like(p, 0.5 ** (number // 8))
                state["factor"] = torch.tensor(0.5 ** (number // 8))
            state["mean"].lerp_(p.grad, 0.1)
            p.sub_(state["mean"] * state["factor"], alpha=rate)


class LooksAtWidth(Descends):
    """Its constructor looks at the largest parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.width = max(max(p.shape, default=1) for p in self.param_groups[0]["params"])

    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            p.sub_(p.grad, alpha=rate * 8 / max(self.width, 8))


class ClipsByWidth(LooksAtWidth):
    """Asks about each parameter, and cannot ask about each alone."""

    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            grad = p.grad / p.grad.norm() if p.grad.norm() > self.width else p.grad
            p.sub_(grad, alpha=rate)


class ClearsRows(Descends):
    """Leaves out the rows whose gradient is small, in matrices and convolutions."""

    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            grad = p.grad.clone()
            if p.ndim > 1:
                grad[grad.flatten(1).norm(dim=1) < 3] = 0.0
            p.sub_(grad, alpha=rate)


class KeepsCounterOfOneElement(Descends):
    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros(1)
            state["step"] += 1
            p.sub_(p.grad / state["step"].item(), alpha=rate)


class CountsOnCpu(Descends):
    """Makes a counter without a device."""

    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros(1)
            state["step"] += 1
            table = torch.tensor([1.0, 0.5, 0.25], device=p.device)
            weight = table.index_select(0, torch.tensor([group["t"] % 3], device=p.device))
            p.sub_((p.grad / state["step"] * weight).view_as(p), alpha=rate)


class TakesBits(Descends):
    def rate(self, group: dict[str, Any]) -> Any:
        return group["lr"] * (2 if group["t"] & 3 == 1 else 1) / (1 + (group["t"] >> 2))


class PassesArguments(Descends):
    def step(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        super().step(*args, **kwargs)


@pytest.mark.parametrize("flat", [False, True], ids=["per_tensor", "flat"])
@pytest.mark.parametrize(
    "cls",
    [
        SlowsFirst,
        BeginsByPlace,
        LooksAtWidth,
        ClearsRows,
        KeepsCounterOfOneElement,
        CountsOnCpu,
        TakesBits,
        PassesArguments,
    ],
)
def test_a_class_that_goes_by_place_size_or_shape_follows_its_own_loop(cls: Any, flat: bool) -> None:
    assert_follows(cls, stateless(cls), flat=flat, shapes=OTHER_SHAPES)


@pytest.mark.parametrize("flat", [False, True], ids=["per_tensor", "flat"])
def test_a_counter_of_one_element_is_saved(flat: bool) -> None:
    step = linear_step(stateless(KeepsCounterOfOneElement))
    params = parameters(OTHER_SHAPES)
    state, _ = step(step.init(params, flat=flat), randn_like(params))
    loaded = step.load_state_dict(step.state_dict(state), like=step.init(params, flat=flat))
    assert_same(loaded.opt_state.state, state.opt_state.state)


_counts = [0]


class CountsElsewhereIn3d(Descends):
    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            _counts[0] += p.ndim == 3
            p.sub_(p.grad, alpha=rate / (1 + _counts[0]) if p.ndim == 3 else rate)


class TwoNamesIfSquare(Descends):
    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            state = self.state[p]
            if not state:
                state["mean"] = torch.zeros_like(p)
                state["sum"] = state["mean"] if p.ndim == 2 and p.shape[0] == p.shape[1] else torch.zeros_like(p)
            state["mean"].lerp_(p.grad, 0.1)
            state["sum"].add_(p.grad)
            p.sub_(state["mean"] + state["sum"], alpha=rate)


class FormatsIfLarge(Descends):
    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            p.sub_(p.grad, alpha=float(f"{rate / group['t']:.6f}") if p.numel() > 500 else rate)


class SketchesIfLarge(Descends):
    """Projects large matrices on a few random directions, others in every fifth step."""

    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            update = p.grad
            if p.numel() > 500:
                state = self.state[p]
                if not state or group["t"] % 5 == 0:
                    state["directions"] = torch.randn(p.shape[1], 4, dtype=p.dtype, device=p.device)
                update = p.grad @ state["directions"] @ state["directions"].T
            p.sub_(update, alpha=rate)


@pytest.mark.parametrize(
    ("cls", "shape"),
    [(CountsElsewhereIn3d, "c"), (TwoNamesIfSquare, "q"), (FormatsIfLarge, "w"), (SketchesIfLarge, "w")],
)
def test_a_class_that_is_not_followed_with_parameters_of_some_shape_is_refused_there(cls: Any, shape: str) -> None:
    optimizer = stateless(cls)
    params = parameters(OTHER_SHAPES)
    optimizer.init({name: value for name, value in params.items() if name != shape})
    with pytest.raises(TypeError, match=rf"stateless: {cls.__name__} cannot be made pure: "):
        optimizer.init(params)


def test_a_class_that_asks_about_each_of_many_parameters_and_goes_by_all_is_refused() -> None:
    with pytest.raises(TypeError, match="branches on numbers that change in training in more than 16 ways"):
        stateless(ClipsByWidth)


class ReadsComplexNumber(Descends):
    def move(self, group: dict[str, Any], rate: Any) -> None:
        for p in group["params"]:
            p.sub_(p.grad * abs(p.grad.mean().item()), alpha=rate)


def test_a_complex_number_that_is_read_in_python_is_refused() -> None:
    optimizer = stateless(ReadsComplexNumber)
    with pytest.raises(TypeError, match="its step reads a complex number in Python"):
        optimizer.init(torch.ones(2, dtype=torch.complex64))


class RoundsRate(Descends):
    def rate(self, group: dict[str, Any]) -> Any:
        return round(group["lr"], 4)


def test_a_schedule_that_is_rounded_to_digits_is_refused() -> None:
    assert stateless(RoundsRate)
    with pytest.raises(TypeError, match="lr must be a number, because RoundsRate rounds it to digits in Python"):
        stateless(RoundsRate, lr=lambda applied: 0.1 / (1 + applied))
