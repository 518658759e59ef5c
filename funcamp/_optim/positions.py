"""Whether a class treats a parameter by its place among the others, or by their number.

`for i, p in enumerate(params)` may give each another rate, and a constructor may look at all sizes. Such a class must
get all parameters at once, each by itself: in its step and when its state is made.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from funcamp._optim.class_state import ClassState, entries_in, zero_of
from funcamp._optim.dataflow import OperationCall, followed
from funcamp._optim.decisions import Instruction
from funcamp._optim.modes import without_modes

if TYPE_CHECKING:
    from funcamp._optim.class_step import ClassStep


def ignores_positions(step: ClassStep, params: Sequence[Tensor]) -> bool:
    """Return whether a step of several parameters calls only what a step of one of them calls, with the same numbers.

    Args:
        step: the class.
        params: tensors without values.
    """
    calls_of_all = _calls_on(step, list(params))
    if calls_of_all is None:
        return False
    kinds = collections.Counter((param.shape, param.dtype) for param in params)
    examples = {(param.shape, param.dtype): param for param in params}
    calls_of_each: collections.Counter[OperationCall] = collections.Counter()
    for kind, count in kinds.items():
        for call, calls in (_calls_on(step, [examples[kind]]) or {}).items():
            calls_of_each[call] += count * calls
    # Not equal: what all share is computed once for all, and once for each.
    return calls_of_all <= calls_of_each


def _calls_on(step: ClassStep, params: list[Tensor]) -> collections.Counter[OperationCall] | None:
    """Return the operations of a first step and of later ones, in which all questions of an instruction are flipped.

    None if the class fails.
    """
    hyper = step.examples("meta")
    groups = [[param] for param in params]
    try:
        form = step.form(params)
        with without_modes():
            flow, _ = followed(groups, lambda: step.run(params, params, None, hyper, step.decisions()))
            calls = collections.Counter(flow.operations)
            per_param = [
                {name: zero_of(entry, param) for name, entry in form.param_entries(index).items()}
                for index, param in enumerate(params)
            ]
            shared = {name: zero_of(entry, params[0]) for name, entry in entries_in(form.shared).items()}
            state = ClassState(per_param, shared)
            known: set[Instruction | None] = {None}
            waiting: list[Instruction | None] = [None]
            while waiting:
                decisions = step.decisions(flipped_instruction=waiting.pop())
                try:
                    run = functools.partial(step.run, params, params, state, hyper, decisions, form)
                    flow, _ = followed(groups, run)
                except Exception:
                    continue  # the class raises on that side: it does not happen
                calls.update(flow.operations)
                new_instructions = {question.instruction for question in decisions.questions} - known
                known |= new_instructions
                waiting += new_instructions
    except Exception:
        return None
    return calls
