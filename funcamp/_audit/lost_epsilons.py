"""Numbers to which an epsilon was added that float16 does not have, and what is computed of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from funcamp._audit.lines import Line
from funcamp._audit.proposals import Call, copied, mapped, result_of, with_number

#: So many results are followed.
_FOLLOWED = 16


class LostEpsilon(NamedTuple):
    """A result that an epsilon should have kept from zero."""

    epsilon: float
    line: Line
    """Where it was added."""
    run: Callable[[float, Callable[[Any], Any]], Any]
    """Returns the result with another epsilon and a change of all inputs; None if an operation does not take them."""


class LostEpsilons:
    """The results of additions of an epsilon that float16 does not have, up to the division."""

    def __init__(self) -> None:
        self._followed: list[tuple[weakref.ref[Tensor], LostEpsilon]] = []

    def note(self, call: Call, epsilon: float, line: Line, result: Tensor) -> None:
        """Remember the result of an addition."""
        copy = copied(call)

        def run(other_epsilon: float, change: Callable[[Any], Any]) -> Any:
            replaced = with_number(epsilon, other_epsilon)
            return result_of(copy, lambda argument: change(replaced(argument)))

        self._follow(result, LostEpsilon(epsilon, line, run))

    def follow(self, call: Call, result: Any) -> None:
        """Remember the result of an operation on a remembered one, such as its root."""
        lost = self.behind(call)
        if lost is not None and isinstance(result, Tensor):
            self._follow(result, lost)

    def behind(self, call: Call) -> LostEpsilon | None:
        """Return a lost epsilon behind an operation's inputs, with this operation run last; None without one."""
        for reference, lost in reversed(self._followed):
            tensor = reference()
            if tensor is not None and _has(call, tensor):
                return LostEpsilon(lost.epsilon, lost.line, _after(lost, call, tensor))
        return None

    def _follow(self, result: Tensor, lost: LostEpsilon) -> None:
        self._followed = [*self._followed[1 - _FOLLOWED :], (weakref.ref(result), lost)]


def _has(call: Call, tensor: Tensor) -> bool:
    return any(argument is tensor for argument in call.arguments)


def _after(lost: LostEpsilon, call: Call, tensor: Tensor) -> Callable[[float, Callable[[Any], Any]], Any]:
    """Return what runs a call on the result of a lost epsilon's own."""
    copy = copied(call)
    places = [index for index, argument in enumerate(call.arguments) if argument is tensor]

    def run(epsilon: float, change: Callable[[Any], Any]) -> Any:
        value = lost.run(epsilon, change)
        if value is None:
            return None
        arguments = [value if index in places else change(one) for index, one in enumerate(copy.arguments)]
        changed = Call(call.function, tuple(arguments), mapped(change, copy.keywords))
        return result_of(changed, lambda argument: argument)

    return run
