"""What the code of an optimizer's class shows: only what its methods reach by the names they use counts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from shutil import rmtree
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed import destroy_process_group
from torch.utils.checkpoint import checkpoint

from funcamp import save, stateless
from funcamp._optim.class_code import catches_zero_divisions
from tests.support.helpers import assert_close
from tests.support.torch_loop import TorchLoop, linear_step, randn_like

#: What a script may import: functions that catch errors, and that no class below uses.
IMPORTED = (rmtree, destroy_process_group, checkpoint, save)


def revision() -> str:
    """Return a text, whatever happens: no class below uses this."""
    with contextlib.suppress(OSError):
        return "main"
    try:
        return str(1 / 0)
    except Exception:
        return "unknown"


def is_on(text: object) -> bool:
    return text is True


def share_of(part: float, whole: float) -> float:
    try:
        return part / whole
    except ZeroDivisionError:
        return 0.25


class Counts(torch.optim.Optimizer):
    """Counts its steps from 1 in a Python number, and steps by a rate that it computes with it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "t": 0})

    def rate(self, group: dict[str, Any]) -> Any:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["t"] += 1
            rate = self.rate(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-rate)


class Rectifies(Counts):
    def rate(self, group: dict[str, Any]) -> Any:
        t = group["t"]
        length = 199 - 2 * t * 0.99**t / (1 - 0.99**t)
        return group["lr"] * (((length - 4) / (length - 2) / (1 - 0.9**t)) if length >= 5 else 1 / (1 - 0.9**t))


class Decays(Counts):
    """Has methods with the names of functions that it does not use."""

    def is_on(self) -> bool:
        return self.revision() != ""

    def revision(self) -> str:
        return "main"

    def rate(self, group: dict[str, Any]) -> Any:
        rate = group["lr"] / (1 + 0.1 * group["t"]) / (2 + group["t"]) / (3 + group["t"]) / (4 + group["t"])
        return rate / (5 + group["t"]) if group["t"] % 5 == 0 else rate / (6 + group["t"])


class Alternates(Counts):
    def rate(self, group: dict[str, Any]) -> Any:
        group["odd"] = not group.get("odd", False)
        return group["lr"] * (2 if group["odd"] else 1)


class AlternatesByHelper(Counts):
    def rate(self, group: dict[str, Any]) -> Any:
        group["odd"] = not group.get("odd", False)
        return group["lr"] * (2 if is_on(group["odd"]) else 1)


@pytest.mark.parametrize("cls", [Rectifies, Decays, Alternates])
def test_functions_that_a_class_does_not_use_change_nothing(cls: Any) -> None:
    assert not catches_zero_divisions(cls)
    params = {"w": torch.randn(3, 2)}
    step = linear_step(stateless(cls))
    state = step.init(params)
    loop = TorchLoop(cls, params)
    for _ in range(8):
        grads = randn_like(params)
        state, _ = step(state, grads)
        assert_close(state.params.tree(), loop.step(grads), 1e-6)


def test_a_function_that_a_class_uses_and_that_asks_for_true_itself_refuses_it() -> None:
    with pytest.raises(TypeError, match="its is_on asks `is True`, and it keeps 'odd'"):
        stateless(AlternatesByHelper)


class DividesByHelper(Counts):
    def rate(self, group: dict[str, Any]) -> Any:
        return share_of(group["lr"], group["t"] - 3)


class DividesByDefault(Counts):
    def rate(self, group: dict[str, Any], divide: Callable[[float, float], float] = share_of) -> Any:
        return divide(group["lr"], group["t"] - 3)


def without_error(function: Callable[..., float]) -> Callable[..., float]:
    def called(*args: Any) -> float:
        try:
            return function(*args)
        except ArithmeticError:
            return 0.25

    return called


class DividesByDecorator(Counts):
    @without_error
    def rate(self, group: dict[str, Any]) -> Any:
        return group["lr"] / (group["t"] - 3)


class DividesByStaticMethod(Counts):
    divide = staticmethod(share_of)

    def rate(self, group: dict[str, Any]) -> Any:
        return self.divide(group["lr"], group["t"] - 3)


class DividesByTable(Counts):
    table: ClassVar = {"share": functools.partial(share_of, 0.1)}

    def rate(self, group: dict[str, Any]) -> Any:
        return self.table["share"](group["t"] - 3)


class Divider:
    def __call__(self, part: float, whole: float) -> float:
        return share_of(part, whole)


DIVIDER = Divider()


class DividesByObject(Counts):
    def rate(self, group: dict[str, Any]) -> Any:
        return DIVIDER(group["lr"], group["t"] - 3)


class DividesByImport(Counts):
    def rate(self, group: dict[str, Any]) -> Any:
        from tests.optim import test_class_code

        return test_class_code.share_of(group["lr"], group["t"] - 3)


@pytest.mark.parametrize(
    "cls",
    [
        DividesByHelper,
        DividesByDefault,
        DividesByDecorator,
        DividesByStaticMethod,
        DividesByTable,
        DividesByObject,
        DividesByImport,
    ],
)
def test_a_function_that_a_class_uses_may_catch_its_division_by_0(cls: Any) -> None:
    assert catches_zero_divisions(cls)
    params = {"w": torch.randn(3, 2)}
    step = linear_step(stateless(cls))
    state = step.init(params)
    loop = TorchLoop(cls, params)
    for _ in range(5):
        grads = randn_like(params)
        state, _ = step(state, grads)
        assert_close(state.params.tree(), loop.step(grads), 1e-6)


def exponential(value: float) -> float:
    import math

    try:
        return math.exp(value)
    except OverflowError:
        return 0.0


class GrowsByHelper(Counts):
    """Overflows after 709 steps, which no trial sees."""

    def rate(self, group: dict[str, Any]) -> Any:
        return 1e-300 * exponential(group["t"])


def test_a_function_that_a_class_uses_and_that_catches_an_overflow_of_math_refuses_it() -> None:
    with pytest.raises(TypeError, match="its exponential may catch OverflowError of math"):
        stateless(GrowsByHelper)
