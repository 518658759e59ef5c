"""Classes of other packages: each follows its own loop, with skipped steps. What is refused is in test_refusals.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from funcamp import ravel, schedule, stateless
from tests.support.foreign import Base, Kept, ScheduleFree
from tests.support.helpers import assert_close, assert_same, clone
from tests.support.steps import eager_and_traced
from tests.support.torch_loop import TorchLoop, linear_step, randn_like

STEPS = 24
SKIPPED = (0, 4, 17)
#: In this step gradients are large.
LARGE = 9
#: As Python has it: a step has another in its place.
SQRT = math.sqrt
#: Two parameters have one shape.
SHAPES = {"w": (3, 4), "b": (4,), "v": (3, 4)}


def example() -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


class CountsInState(Base):
    """Two counters in Python ints, a power, a root and a parameter of the first step."""

    def move(self, p: Any, state: Kept, group: Kept) -> None:
        if not state:
            state.update(step=0, mean=torch.zeros_like(p), slow=p.clone())
        state["step"] += 1
        correction = math.sqrt(1 - 0.9 ** state["step"])
        state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
        p.addcdiv_(state["mean"], state["mean"].abs().add_(0.1), value=-group["lr"] * correction)
        state["slow"].lerp_(p, 1 / (1 + state["step"]))
        p.lerp_(state["slow"], 0.5)


class CountsInGroup(Base):
    """Rectification: another formula after some steps, and a rate that decays at every third one."""

    options: ClassVar[Kept] = {"k": 0}

    def begin(self, group: Kept) -> None:
        group["k"] += 1
        if group["k"] % 3 == 0:
            group["lr"] *= 0.9

    def move(self, p: Any, state: Kept, group: Kept) -> None:
        p.mul_(1 - 0.1 * group["lr"])
        p.sub_(p.grad.sign() if group["k"] <= 5 else p.grad, alpha=group["lr"])


class KeepsOtherKinds(Base):
    """A count in an attribute, a flag and a number that the first step sets, tensors in a list."""

    options: ClassVar[Kept] = {"is_ready": False, "factor": None}

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.count = 0

    def begin(self, group: Kept) -> None:
        self.count += 1
        if not group["is_ready"]:
            group["factor"] = 0.5
            group["is_ready"] = True

    def move(self, p: Any, state: Kept, group: Kept) -> None:
        means = state.setdefault("means", [torch.zeros_like(p) for _ in range(2)])
        for weight, mean in zip((0.1, group["factor"]), means):
            mean.lerp_(p.grad, weight)
        p.sub_(means[0] + means[1], alpha=group["lr"] / min(self.count, 5))


class BeginsOtherwise(Base):
    """Its first step is another formula."""

    def move(self, p: Any, state: Kept, group: Kept) -> None:
        if "mean" not in state:
            state["mean"] = p.grad.clone()
            p.sub_(p.grad.sign(), alpha=group["lr"])
            return
        state["mean"].lerp_(p.grad, 0.3)
        p.sub_(state["mean"], alpha=group["lr"])


class DividesByZero(Base):
    options: ClassVar[Kept] = {"k": -2}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        try:
            self.rate = group["lr"] / group["k"]
        except ZeroDivisionError:
            self.rate = group["lr"] / 10
        group["k"] += 1
        super().step()

    def move(self, p: Any, state: Kept, group: Kept) -> None:
        p.sub_(p.grad, alpha=self.rate)


class AsksEach(Base):
    """Each parameter asks three questions of its own: too many ways for all together."""

    def move(self, p: Any, state: Kept, group: Kept) -> None:
        norm = p.grad.norm().item()
        rate = group["lr"] * (0.1 if norm > 5 else 1.0)
        rate = rate * 0.5 if p.abs().max() > 2 else rate
        p.sub_(p.grad, alpha=rate if norm > 2 else 2 * rate)


class ClipsAll(CountsInGroup):
    """What a parameter does depends on all gradients, and each asks about the same count."""

    def begin(self, group: Kept) -> None:
        super().begin(group)
        norm = math.sqrt(sum(p.grad.norm().item() ** 2 for p in group["params"]))
        self.rate = group["lr"] / max(1.0, norm)

    def move(self, p: Any, state: Kept, group: Kept) -> None:
        p.sub_(p.grad, alpha=self.rate if group["k"] <= 5 else 0.5 * self.rate)


class Decomposes(Base):
    """Its function raises for a gradient that is not finite, which a skipped step has."""

    def move(self, p: Any, state: Kept, group: Kept) -> None:
        matrix = p.grad.reshape(p.shape[0], -1)
        vectors = torch.linalg.eigh(matrix @ matrix.mT + torch.eye(len(p)).to(p))[1]
        p.sub_((vectors @ vectors.mT @ matrix).reshape(p.shape), alpha=group["lr"])


class ChangesLate(Base):
    """Its first count is 1, and matters after more steps than are tried."""

    def move(self, p: Any, state: Kept, group: Kept) -> None:
        state["step"] = state.get("step", 0) + 1
        p.sub_(p.grad if state["step"] < 12 else p.grad.sign(), alpha=group["lr"])


FOLLOWED = [
    *(CountsInState, CountsInGroup, KeepsOtherKinds, BeginsOtherwise, DividesByZero),
    *(AsksEach, ClipsAll, Decomposes, ScheduleFree, ChangesLate),
]


def name_of(cls: Any) -> str | None:
    return cls.__name__ if isinstance(cls, type) else None


@pytest.fixture(autouse=True)
def _same_data(_fresh: None) -> None:
    torch.manual_seed(0)


@eager_and_traced
@pytest.mark.parametrize("cls", FOLLOWED, ids=name_of)
def test_a_class_follows_its_own_loop_with_skipped_steps(cls: Any, wrap: Any) -> None:
    step = linear_step(stateless(cls))
    run = wrap(step)
    params = example()
    state, loop = step.init(params), TorchLoop(cls, params)
    for number in range(STEPS):
        size = 30.0 if number == LARGE else 1.0
        grads = {name: size * grad for name, grad in randn_like(params).items()}
        if number in SKIPPED:
            state, _ = run(state, {name: grad * math.inf for name, grad in grads.items()})
        else:
            state, _ = run(state, grads)
            assert_close(state.params.tree(), loop.step(grads), 1e-6)


def assert_follows(
    optimizer: Any,
    loop: TorchLoop,
    params: Any,
    *,
    tolerance: float = 1e-6,
    without: Callable[[int], tuple[str, ...]] = lambda _: (),
    scheduler: Any = None,
) -> tuple[Any, Any]:
    """Take steps, in which some parameters have no gradient; return the parameters and the state after them."""
    opt_state = optimizer.init(params)
    for number in range(STEPS):
        grads: Any = {**randn_like(params), **dict.fromkeys(without(number))}
        params, opt_state = optimizer.update(params, grads, opt_state)
        assert_close(params, loop.step(grads), tolerance)
        if scheduler is not None:
            scheduler.step()
    return params, opt_state


@pytest.mark.parametrize("cls", [CountsInState, CountsInGroup], ids=name_of)
def test_a_number_is_rounded_as_pythons_in_16_bits(cls: Any) -> None:
    params = {name: value.to(torch.bfloat16) for name, value in example().items()}
    assert_follows(stateless(cls), TorchLoop(cls, params), params, tolerance=2 * torch.finfo(torch.bfloat16).eps)


def test_a_schedule_changes_the_group() -> None:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    params = example()
    loop = TorchLoop(CountsInState, params)
    optimizer = schedule(stateless(CountsInState, lr=0.1), make, steps=STEPS)
    assert_follows(optimizer, loop, params, scheduler=make(loop.optimizer))


@pytest.mark.parametrize("cls", [CountsInState, KeepsOtherKinds], ids=name_of)
def test_a_state_is_saved_by_the_step_and_not_in_torchs_format(cls: Any) -> None:
    # contract: "`to_torch` and `from_torch` with optimizers of other packages"
    step, grads = linear_step(stateless(cls)), randn_like(example())
    state, _ = step(step.init(example()), grads)
    again = step.load_state_dict(step.state_dict(state), like=step.init(example()))
    assert_same(step(again, grads), step(state, grads))
    message = "must be of a class of torch.optim; got stateless.*: save and load with step.state_dict"
    with pytest.raises(TypeError, match=f"to_torch: .*{message}"):
        step.to_torch(state)
    with pytest.raises(TypeError, match=f"from_torch: .*{message}"):
        step.from_torch(state, optimizer={"state": {}, "param_groups": []})


def test_evaluation_params_are_those_that_the_classs_eval_sets() -> None:
    params = example()
    loop, optimizer = TorchLoop(ScheduleFree, params), stateless(ScheduleFree)
    params, opt_state = assert_follows(optimizer, loop, params)
    loop.optimizer.eval()
    evaluated = optimizer.evaluation_params(params, opt_state)
    assert_close(evaluated, loop.params(), 1e-6)
    assert not torch.equal(evaluated["w"], params["w"])
    nothing = {"w": None}  # what by_group gives the optimizer of a label without parameters
    assert optimizer.evaluation_params(nothing, optimizer.init(nothing)) == nothing


def test_a_late_first_gradient_begins_a_parameter_late() -> None:
    params = example()
    loop = TorchLoop(CountsInState, params)
    assert_follows(stateless(CountsInState), loop, params, without=lambda number: ("b",) if number < 3 else ())


def test_a_class_is_stored_per_tensor_and_leaves_the_callers_tensors_alone() -> None:
    optimizer = stateless(CountsInGroup)
    assert repr(optimizer).endswith("[per tensor]")
    params: Any = ravel(example())
    grads = params.ravel(example())
    before = clone((params, grads))
    new, opt_state = optimizer.update(params, grads, optimizer.init(params))
    assert_same((params, grads), before)
    assert math.sqrt is SQRT
    assert type(new) is type(params)
    assert opt_state.shared["k"] == 1
