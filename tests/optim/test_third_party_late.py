"""Optimizers that torch does not ship, where a trial of a few steps with all gradients shows little of what they do."""

from __future__ import annotations

import collections
import math
import re
import types
from typing import Any

import pytest
import torch

from funcamp import stateless
from tests.support.helpers import assert_close
from tests.support.torch_loop import TorchLoop, linear_step

SHAPES = {"w": (8, 16), "b": (4,), "v": (8, 16)}


def example() -> dict[str, torch.Tensor]:
    """Random parameters, or gradients of such."""
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


class Counting(torch.optim.Optimizer):
    """Counts in its group; the rest of each class below."""

    def __init__(self, params: Any, lr: float = 0.1, **options: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0, **options})

    def count(self) -> Any:
        self.param_groups[0]["k"] += 1
        return self.param_groups[0]["k"]

    def each(self) -> list[Any]:
        return [p for p in self.param_groups[0]["params"] if p.grad is not None]


class CouplesLargeOnes(Counting):
    """Divides large matrices by their common norm, from the second step on, and asks a question of each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        k = self.count()
        large = [p for p in self.each() if p.numel() >= 64]
        norm = torch.stack([p.grad.norm() for p in large]).norm() if large else 1.0
        for p in self.each():
            update = p.grad / p.grad.norm() if p.grad.norm() > 1 else p.grad
            p.sub_(update * 10 / norm if p.numel() >= 64 and k > 1 else update, alpha=0.1)


class WritesByData(Counting):
    """Writes into an attribute by `data`, in every fifth step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.scale = torch.ones(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        k = self.count()
        for p in self.each():
            p.sub_(p.grad * self.scale.to(p), alpha=0.1)
        if k % 5 == 0:
            self.scale.data.mul_(0.1)


class GoesByPlaces(Counting):
    """Has a rate for each place in the list of parameters, with or without a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params: list[Any] = self.param_groups[0]["params"]
        for index, p in enumerate(params):
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1 * 0.5 ** (len(params) - index))


class BeginsWithTheGradient(Counting):
    """Averages gradients from the parameter's first one on, by the count of all: the first step hides the beginning."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        k = self.count()
        for p in self.each():
            state = self.state[p]
            if not state:
                state["mean"] = p.grad.clone()
            state["mean"].lerp_(p.grad, 1 / k)
            p.sub_(state["mean"], alpha=0.1)


class UsesWhatIsMade(Counting):
    """Makes a matrix in the first step of a parameter and in every third, and knows when it has made it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        k = self.count()
        for p in self.each():
            state = self.state[p]
            if not state:
                state["made"], state["at"] = None, -1
            if (state["made"] is None or k % 3 == 0) and k != state["at"]:
                state["made"], state["at"] = p.grad.abs() + 1, k
            p.sub_(p.grad / state["made"].clone(), alpha=0.1)


CLASSES = [CouplesLargeOnes, WritesByData, GoesByPlaces, BeginsWithTheGradient, UsesWhatIsMade]
#: For each the steps in which a parameter has no gradient.
ABSENCES: dict[str, dict[str, range]] = {
    "none": {},
    "first": {"w": range(5)},
    "last": {"v": range(3)},
    "between": {"b": range(4, 6), "w": range(9, 10)},
}


@pytest.mark.parametrize("absent", ABSENCES)
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_class_follows_itself_if_gradients_are_missing(cls: Any, absent: str) -> None:
    params = example()
    loop, optimizer = TorchLoop(cls, params), stateless(cls)
    state = optimizer.init(params)
    for number in range(12):
        grads: dict[str, Any] = {**example()}
        for name, steps in ABSENCES[absent].items():
            if number in steps:
                grads[name] = None
        params, state = optimizer.update(params, grads, state)
        assert_close(params, loop.step(grads), 1e-5)


class KeepsTheParameter(Counting):
    """Keeps the parameter itself from the twentieth step on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        k = self.count()
        for p in self.each():
            state = self.state[p]
            if not state:
                state["anchor"] = p.clone()
            p.sub_(p.grad + 0.1 * (p - state["anchor"]), alpha=0.1)
            if k == 20:
                state["anchor"] = p.data


class BeginsWithAll(Counting):
    """Wraps an optimizer, and begins an average for each parameter in the first step, with or without a gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.optimizer = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1, momentum=0.9, dampening=0.5)
        self.slow: dict[Any, Any] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.count() == 1:
            self.slow = {p: p.clone() for p in self.param_groups[0]["params"]}
        self.optimizer.step()
        for p in self.param_groups[0]["params"]:
            self.slow[p].lerp_(p + 1, 0.1)
        for p in self.each():
            p.copy_(self.slow[p])


def test_a_class_that_begins_with_all_parameters_refuses_a_gradient_of_none() -> None:
    optimizer = stateless(BeginsWithAll)
    params = {"w": torch.ones(2), "b": torch.ones(3)}
    state = optimizer.init(params)
    message = r"grads\['w'\] must be a tensor, as all gradients of BeginsWithAll.* got None"
    with pytest.raises(ValueError, match=message):
        optimizer.update(params, {"w": None, "b": torch.ones(3)}, state)
    optimizer.update(params, {"w": torch.ones(2), "b": torch.ones(3)}, state)


class ChoosesWhenMade(Counting):
    """Decays weights if the decay that its constructor gets is not 0."""

    def __init__(self, params: Any, lr: float = 0.1, decay: float = 0.0) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be in [0, 1); got {decay}")
        super().__init__(params, lr, decay=decay)
        self.decays = decay > 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.each():
            if self.decays:
                p.mul_(1 - self.param_groups[0]["decay"])
            p.sub_(p.grad, alpha=0.1)


def test_one_tensor_under_two_names_is_refused() -> None:
    with pytest.raises(TypeError, match=r"KeepsTheParameter .* keeps one tensor as anchor and as the parameter"):
        stateless(KeepsTheParameter)


def test_a_schedule_by_which_the_constructor_chooses_is_refused() -> None:
    assert stateless(ChoosesWhenMade, decay=0.1, lr=lambda count: 0.1 / (1 + count)) is not None
    with pytest.raises(TypeError, match="decay must be a number, because the constructor of ChoosesWhenMade chooses"):
        stateless(ChoosesWhenMade, decay=lambda count: 0.01 * count)


class CountsAlways(Counting):
    """Decays all parameters, with or without a gradient, by the count of its steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        k = self.count()
        params: list[Any] = self.param_groups[0]["params"]
        for p in params:
            p.mul_(1 - 0.1 / k)
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)


class AsksWithinAQuestion(Counting):
    """Normalizes in a branch within a branch, and counts there."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        k = self.count()
        for p in self.each():
            update = p.grad
            if k > 6 and k > 8:
                update = update / update.norm()
            p.sub_(update, alpha=0.1)


class CountsInADefaultDict(Counting):
    """Counts in a `defaultdict` of the state, where a late key is no error."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        k = self.count()
        for p in self.each():
            counts = self.state[p].setdefault("counts", collections.defaultdict(int))
            counts["late" if k > 6 else "early"] += 1
            p.sub_(p.grad, alpha=0.1 / (1 + counts["early"] + counts["late"]))


class AsksIfClose(Counting):
    """Asks `math.isclose`, which reads floats in C."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        k = self.count()
        for p in self.each():
            p.sub_(p.grad, alpha=0.5 if math.isclose(k, 7, rel_tol=1e-3) else 0.1)


@pytest.mark.parametrize("flat", [False, True], ids=["per_tensor", "flat"])
@pytest.mark.parametrize(
    "cls", [CountsAlways, AsksWithinAQuestion, CountsInADefaultDict, AsksIfClose], ids=lambda cls: cls.__name__
)
def test_a_class_follows_itself_into_later_branches(cls: Any, flat: bool) -> None:
    step = linear_step(stateless(cls))
    params = example()
    loop, state = TorchLoop(cls, params), step.init(params, flat=flat)
    for _ in range(12):
        grads = example()
        state, _ = step(state, grads)
        assert_close(state.params.tree(), loop.step(grads), 1e-5)


def test_a_class_that_steps_without_gradients_does_so_as_a_function() -> None:
    optimizer = stateless(CountsAlways)
    params = {"w": torch.ones(2)}
    loop, state = TorchLoop(CountsAlways, params), optimizer.init(params)
    for _ in range(3):
        params, state = optimizer.update(params, {"w": None}, state)
        assert_close(params, loop.step({"w": None}), 1e-6)


class Keeper(Counting):
    """Changes something in its fifteenth step, where it is not followed."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.kept, self.scale = types.SimpleNamespace(factor=1.0), torch.ones(())

    def change(self) -> None:
        """Change it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.count() == 15:
            self.change()
        for p in self.each():
            p.sub_(p.grad, alpha=0.1)


CHANGES: dict[str, Any] = {
    "self.kept.factor": lambda self: setattr(self.kept, "factor", 0.1),
    "defaults": lambda self: self.defaults.update(lr=0.2),
    "hooks": lambda self: self.register_step_pre_hook(lambda *_: None),
    "param_groups": lambda self: self.param_groups[0].update(params=self.param_groups[0]["params"][1:]),
    "the memory of self.scale": lambda self: setattr(self.scale, "data", torch.tensor(0.1)),
    "attributes of a parameter": lambda self: setattr(self.param_groups[0]["params"][0], "mine", 1),
    "attributes that are no values": lambda self: setattr(self, "other", lambda: 0.1),
}


@pytest.mark.parametrize("place", CHANGES)
def test_what_a_later_step_changes_elsewhere_is_refused(place: str) -> None:
    cls = type("Changes", (Keeper,), {"change": CHANGES[place]})
    with pytest.raises(TypeError, match=f"some step of it changes {re.escape(place)}, where it is not followed"):
        stateless(cls)


class FreezesLater(Keeper):
    def change(self) -> None:
        self.param_groups[0]["params"][0].requires_grad_(False)


class ReshapesLater(Counting):
    """Averages over rows from the fifteenth step on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        k = self.count()
        for p in self.each():
            state = self.state[p]
            state.setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            if k == 15:
                state["mean"] = state["mean"].mean(0, keepdim=True)
            p.sub_(state["mean"], alpha=0.1)


def test_a_parameter_that_a_later_step_freezes_is_refused() -> None:
    with pytest.raises(TypeError, match="FreezesLater cannot be made pure: its step sets requires_grad of a parameter"):
        stateless(FreezesLater)


def test_a_state_of_two_shapes_is_refused() -> None:
    with pytest.raises(TypeError, match=r"on one path .* shape \(\d, \d\), on another of .* shape \(\d, \d\)"):
        stateless(ReshapesLater)


class KeepsTheRate(Counting):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.first_rate = 10 * lr

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.each():
            p.sub_(p.grad, alpha=self.first_rate)


def test_a_schedule_of_which_the_constructor_keeps_a_number_is_refused() -> None:
    assert stateless(KeepsTheRate, lr=0.2) is not None
    with pytest.raises(TypeError, match=r"lr must be a number, because the constructor .* as self.first_rate"):
        stateless(KeepsTheRate, lr=lambda count: 0.1 / (1 + count))
