"""Whether a class treats a parameter by its place among the others, or by their number.

`for i, p in enumerate(params)` may give each another rate, and a constructor may look at all sizes. Such a class must
get all parameters at once, each by itself: in its step and when its state is made.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from funcamp._optim.class_state import zero_state
from funcamp._optim.dataflow import OperationCall, followed
from funcamp._optim.decisions import Instruction
from funcamp._optim.modes import without_modes

if TYPE_CHECKING:
    from funcamp._optim.class_step import ClassStep

#: How often each operation is called.
_Calls: TypeAlias = collections.Counter[OperationCall]


def ignores_positions(step: ClassStep, params: Sequence[Tensor]) -> bool:
    """Return whether a step of several parameters calls only what a step of one of them calls, with the same numbers.

    Args:
        step: the class.
        params: tensors without values.
    """
    of_all = _calls_on(step, list(params))
    counts = collections.Counter((param.shape, param.dtype) for param in params)
    examples = {(param.shape, param.dtype): param for param in params}
    of_each = {kind: _calls_on(step, [example]) for kind, example in examples.items()}
    if of_all is None:
        return False
    for run, calls in of_all.items():
        calls_of_each: _Calls = collections.Counter()
        for kind, count in counts.items():
            calls_of_one = of_each[kind] or {}
            # One that does not ask this question has no such run.
            for call, call_count in calls_of_one.get(run, calls_of_one.get(None, {})).items():
                calls_of_each[call] += count * call_count
        # Not equal: what all share is computed once for all, and once for each.
        if not calls <= calls_of_each:
            return False
    return True


def _calls_on(step: ClassStep, params: list[Tensor]) -> dict[Hashable, _Calls] | None:
    """Return the operations of some runs; None if the class fails.

    The runs are a first step ("first"), a later one (None), and for each instruction that asks a question one in which
    all its questions are flipped.
    """
    hyper = step.examples("meta")
    groups = [[param] for param in params]
    try:
        form = step.form(params)
        with without_modes():
            flow, _ = followed(groups, lambda: step.run(params, params, None, hyper, step.decisions()))
            calls: dict[Hashable, _Calls] = {"first": collections.Counter(flow.operations)}
            state = zero_state(form, params)
            waiting: list[Instruction | None] = [None]
            while waiting:
                flipped = waiting.pop()
                decisions = step.decisions(flipped_instruction=flipped)
                run = functools.partial(step.run, params, params, state, hyper, decisions, form)
                try:
                    flow, _ = followed(groups, run)
                except Exception:
                    if flipped is None:
                        raise
                    calls[flipped] = collections.Counter()  # the class raises on that side: it does not happen
                    continue
                calls[flipped] = collections.Counter(flow.operations)
                instructions = {question.instruction for question in decisions.questions}
                waiting += [one for one in instructions if one not in calls and one not in waiting]
    except Exception:
        return None
    return calls
