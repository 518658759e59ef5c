"""The numbers of a class that change in training, found by steps along every path on tensors without values.

`record.changing_in` finds those that change in the few steps of a trial. A number that only another path changes shows
as a `ChangedConstantError` of a step along it: then it becomes a tensor of the state, and the steps are taken anew.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from funcamp._optim.arguments import first_line, impure, is_own_refusal
from funcamp._optim.class_state import ChangedConstantError, ClassState, Entry
from funcamp._optim.class_step import ClassStep, empty_state
from funcamp._optim.hyperparameters import Hyper
from funcamp._optim.instance_state import Kind, container_of, kind_of, wider
from funcamp._optim.trial import inputs_on


def with_changing_numbers(step: ClassStep) -> ClassStep:
    """Return the class with all its numbers that change, from two steps on tensors without values, on every path.

    Raises:
        TypeError: a step reads a value, or its state has no one form.
    """
    for _ in range(_LARGEST_COUNT_OF_CHANGES):
        try:
            return _after_two_steps(step)
        except Exception as error:
            changed = error.__cause__
            if isinstance(changed, ChangedConstantError):
                if changed.is_of_another_form and not step.changing.form_changes:
                    step = replace(step, changing=step.changing._replace(form_changes=True), _forms={})
                    continue
                if changed.is_shared or _is_change_of_number(changed):
                    step = _with_change(step, changed)
                    continue
            if is_own_refusal(error):
                raise
            raise impure(
                step.cls,
                "its step fails on tensors without values, as it does if it reads one on the host "
                f"({type(error).__name__}: {first_line(error)}); "
                "use it in an ordinary loop with funcamp.GradScaler",
            ) from error
    raise impure(step.cls, "it changes more numbers than can be followed; use it in an ordinary loop")


#: The largest number of entries that are found one by one.
_LARGEST_COUNT_OF_CHANGES = 32


def _after_two_steps(step: ClassStep) -> ClassStep:
    """Take two steps on tensors without values; return the class, with whether its parameters step separately."""
    hyper = step.examples("meta")
    question_counts: list[int] = []
    for count in (1, 2):
        params, grads = (tensors[:count] for tensors in inputs_on("meta"))
        asks_for_each = bool(question_counts) and _question_count(step, params, grads, hyper) > question_counts[0]
        if asks_for_each:  # two may have too many paths together
            return replace(step, steps_separately=True, _forms={})
        first = step.along_paths(params, grads, None, empty_state(params), hyper)
        step.along_paths(first.params, grads, first.state, first.state, hyper)
        question_counts.append(_question_count(step, params, grads, hyper))
    return step


def _question_count(step: ClassStep, params: list[Tensor], grads: list[Tensor], hyper: Hyper) -> int:
    """Return how many questions two steps ask along one path."""
    decisions, later_decisions = step.decisions(), step.decisions()
    step.run(params, grads, None, hyper, decisions)
    # The state after the first step, from a step of each parameter: all together may have too many paths.
    first_steps = []
    for param, grad in zip(params, grads):
        first_steps.append(step.along_paths([param], [grad], None, empty_state([param]), hyper))
    new_params = [stepped.params[0] for stepped in first_steps]
    state = ClassState([stepped.state.per_param[0] for stepped in first_steps], first_steps[0].state.shared)
    step.run(new_params, grads, state, hyper, later_decisions)
    return len(decisions.questions) + len(later_decisions.questions)


def _is_change_of_number(changed: ChangedConstantError) -> bool:
    """Return whether what has changed is a number, before and after; a tensor of shape () is one."""
    values = [value for value in (changed.before, changed.after) if not isinstance(value, Entry)]
    return all(kind_of(value) is not None and (not isinstance(value, Tensor) or value.numel() == 1) for value in values)


def _with_change(step: ClassStep, changed: ChangedConstantError) -> ClassStep:
    """Return the class with one number more that changes."""
    if changed.is_shared:
        names = step.changing.shared_names | {container_of(changed.name)}
        step = replace(step, changing=step.changing._replace(shared_names=names), _forms={})
        if not _is_change_of_number(changed):
            return step
    kind: Kind = "bool"
    for value in (changed.before, changed.after):
        value_kind = "float" if isinstance(value, Entry) else kind_of(value)
        assert value_kind is not None
        kind = wider(kind, "float" if value_kind == "tensor" else value_kind)
    changing = step.changing
    per_param = changing.per_param | {changed.name: wider(changing.per_param.get(changed.name), kind)}
    shared = changing.shared | {changed.name: wider(changing.shared.get(changed.name), kind)}
    is_known = per_param == changing.per_param and shared == changing.shared
    if is_known and not changed.is_shared:
        raise impure(step.cls, f"its state entry {changed.name!r} is no number after every step; got {changed.after!r}")
    return replace(step, changing=changing._replace(per_param=per_param, shared=shared), _forms={})
