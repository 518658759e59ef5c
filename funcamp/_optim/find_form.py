"""The form in which a class stores the state of parameters, found by its steps on tensors without values."""

from __future__ import annotations

import collections
import contextlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._optim.arguments import is_torchs
from funcamp._optim.class_state import ClassState, Entries, Form, entries_in, form_of, zero_state, zeros_of
from funcamp._optim.containers import leaves_of
from funcamp._optim.dataflow import Dataflow, followed
from funcamp._optim.decisions import Decisions, OtherAnswers, results_of_paths
from funcamp._optim.instance_state import Contents, InstanceState
from funcamp._optim.modes import without_modes
from funcamp._optim.run import StepRun

if TYPE_CHECKING:
    from funcamp._optim.class_step import ClassStep

#: How many forms there may be: each is a run in every step.
LARGEST_STAGE_COUNT = 8


def find_form(step: ClassStep, params: list[Tensor]) -> Form:
    """Return how a class stores the state of such parameters, from a first step on tensors without values."""
    hyper = step.examples("meta")
    with without_modes():
        empty = [torch.zeros(param.shape, dtype=param.dtype, device="meta") for param in params]
        groups = [[param] for param in empty]
        flow, step_run = followed(groups, lambda: step.run(empty, empty, None, hyper, step.decisions()))
    operations = tuple(operation[0] for operation in flow.operations)
    form = form_of(step_run.state, step_run.first_values, step.changing)
    form = form._replace(operations=operations, is_separable=_is_separable(flow, step_run))
    if step.changing.shared_names - form.shared.keys():
        form = _with_entries_of_other_paths(step, form, empty)
    if step.changing.form_changes:
        form = _with_later_forms(step, form, empty)
    # torch's classes treat parameters of all shapes alike.
    if step.steps_separately and form.is_separable and len(params) > 1 and not is_torchs(step.cls):
        form = form._replace(is_separable=_is_separable_later(step, form, empty))
    return form


def _with_entries_of_other_paths(step: ClassStep, form: Form, empty: list[Tensor]) -> Form:
    """Return a form with what all parameters share that only other paths of a first step set."""

    def run(decisions: Decisions) -> Form:
        step_run = step.run(empty, empty, None, step.examples("meta"), decisions)
        return form_of(step_run.state, step_run.first_values, step.changing)

    shared = dict(form.shared)
    with without_modes():
        for path_form in results_of_paths(run, step.decisions):
            shared = path_form.shared | shared
    return form._replace(shared=shared)


def _is_separable_later(step: ClassStep, form: Form, empty: list[Tensor]) -> bool:
    """Return whether each parameter depends on no other in a later step, whatever its questions are answered.

    A class may couple parameters of some shapes only. Two of each kind show it.
    """
    form, empty = _two_of_each(form, empty)
    grads = [torch.empty_like(param) for param in empty]
    state = zero_state(form, empty)
    groups = [[param, grad, *entries.values()] for param, grad, entries in zip(empty, grads, state.per_param)]
    hyper = step.examples("meta")

    def is_separable(decisions: Decisions) -> bool:
        with without_modes():
            flow, step_run = followed(groups, lambda: step.run(empty, grads, state, hyper, decisions, form))
        return _is_separable(flow, step_run)

    proposed = step.decisions()
    if not is_separable(proposed):
        return False
    others = OtherAnswers(proposed.questions, None)
    for answers, _ in others:
        decisions = step.decisions(answers)
        try:
            if not is_separable(decisions):
                return False
        except Exception:
            continue  # the class raises on that side: it does not happen
        others.note(answers, decisions.questions, None)
    return True


def _with_later_forms(step: ClassStep, form: Form, empty: list[Tensor]) -> Form:
    """Return a form with those that the state of each parameter has after later steps, along every path."""
    hyper = step.examples("meta")
    shared = zeros_of(entries_in(form.shared), empty[0])

    def with_forms_after(form: Form, before: Form, per_param: list[Entries]) -> Form:
        def run(decisions: Decisions) -> Form:
            step_run = step.run(empty, empty, ClassState(per_param, shared), hyper, decisions, before)
            return form_of(step_run.state, InstanceState([], {}), step.changing)

        with without_modes():
            for after in results_of_paths(run, step.decisions):
                form = _with_forms(form, after)
        return form

    # First steps of parameters that begin late. As in `ClassStep._step`, a class may fail for these.
    with contextlib.suppress(Exception):
        form = with_forms_after(form, form, [{} for _ in empty])
    stage = 0
    while stage < form.stage_count:
        before = form.at(stage)
        per_param = [zeros_of(entries_in(contents), param) for contents, param in zip(before.per_param, empty)]
        form = with_forms_after(form, before, per_param)
        if form.stage_count > LARGEST_STAGE_COUNT:
            raise TypeError(
                f"stateless: {step.cls.__name__} cannot be made pure: its state grows in more than "
                f"{LARGEST_STAGE_COUNT} steps; make all entries in the first step, or use it in an ordinary loop"
            )
        stage += 1
    return form


def _two_of_each(form: Form, params: list[Tensor]) -> tuple[Form, list[Tensor]]:
    """Return at most two parameters of each shape and dtype, and the form of their state."""
    counts: collections.Counter[tuple[torch.Size, torch.dtype]] = collections.Counter()
    chosen: list[int] = []
    for index, param in enumerate(params):
        kind = param.shape, param.dtype
        counts[kind] += 1
        if counts[kind] <= 2:
            chosen.append(index)
    later_forms = tuple([form.later_forms[index] for index in chosen]) if form.later_forms else ()
    chosen_form = form._replace(per_param=[form.per_param[index] for index in chosen], later_forms=later_forms)
    return chosen_form, [params[index] for index in chosen]


def _is_separable(flow: Dataflow, step_run: StepRun) -> bool:
    """Return whether each parameter and its state depend on no other parameter after a run."""
    states = [_tree.tensors_in(list(leaves_of(contents).values())) for contents in step_run.state.per_param]
    return flow.is_separable([[param, *state] for param, state in zip(step_run.params, states)])


def _with_forms(form: Form, after: Form) -> Form:
    """Return a form with the forms that the state of each parameter has after a step, if they are others."""
    later_forms: list[list[Contents]] = []
    for index, form_after in enumerate(after.per_param):
        stages = form.stages(index)
        is_known = any(leaves_of(stage).keys() == leaves_of(form_after).keys() for stage in stages)
        later_forms.append(stages[1:] if is_known else [*stages[1:], form_after])
    return form._replace(later_forms=tuple(later_forms))
