"""Epsilons that are zero in float16, and the results that are computed from them, up to the division."""

from __future__ import annotations

import weakref
from typing import NamedTuple

from torch import Tensor

from funcamp.report.lines import Line
from funcamp.report.proposals import RunWithEpsilon
from funcamp.report.reruns import Call, Change, copied_as_leaves, mapped, result_of, unchanged, with_number

#: The number of results that are followed at a time.
_FOLLOWED = 16


class LostEpsilon(NamedTuple):
    """An epsilon that is zero in float16, and how to compute a result of it again with another one."""

    epsilon: float
    line: Line
    """Where it was added."""
    run: RunWithEpsilon


class LostEpsilons:
    """The results that are computed from epsilons that are zero in float16."""

    def __init__(self) -> None:
        self._followed: list[tuple[weakref.ref[Tensor], LostEpsilon]] = []

    def note(self, call: Call, epsilon: float, line: Line, result: Tensor) -> None:
        """Remember the result of an addition of an epsilon."""
        copy = copied_as_leaves(call)

        def run(other_epsilon: float, change: Change) -> object:
            replace_epsilon = with_number(epsilon, other_epsilon)
            return result_of(copy, lambda argument: change(replace_epsilon(argument)))

        self._follow(result, LostEpsilon(epsilon, line, run))

    def follow(self, call: Call, result: object) -> None:
        """Remember the result of an operation on a remembered one, such as its root."""
        lost = self.behind(call)
        if lost is not None and isinstance(result, Tensor):
            self._follow(result, lost)

    def behind(self, call: Call) -> LostEpsilon | None:
        """Return the lost epsilon from which an input of an operation is computed; None without one.

        Its `run` computes the result of this operation.
        """
        for reference, lost in reversed(self._followed):
            tensor = reference()
            if tensor is not None and any(argument is tensor for argument in call.arguments):
                return lost._replace(run=_run_followed_by(lost.run, call, tensor))
        return None

    def _follow(self, result: Tensor, lost: LostEpsilon) -> None:
        self._followed = [*self._followed[1 - _FOLLOWED :], (weakref.ref(result), lost)]


def _run_followed_by(run_before: RunWithEpsilon, call: Call, tensor: Tensor) -> RunWithEpsilon:
    """Return what computes a call's result with another epsilon.

    run_before: computes the input of the call that depends on the epsilon.
    tensor: that input in the call.
    """
    copy = copied_as_leaves(call)
    positions = [index for index, argument in enumerate(call.arguments) if argument is tensor]

    def run(epsilon: float, change: Change) -> object:
        value = run_before(epsilon, change)
        if value is None:
            return None
        arguments = [value if index in positions else change(one) for index, one in enumerate(copy.arguments)]
        changed = Call(call.function, tuple(arguments), mapped(change, copy.keywords))
        return result_of(changed, unchanged)

    return run
