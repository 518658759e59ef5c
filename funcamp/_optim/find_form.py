"""The form in which a class stores the state of parameters, found by its steps on tensors without values."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._optim.arguments import is_torchs
from funcamp._optim.class_state import ClassState, Entries, Entry, Form, Held, entries_in, form_of, zero_of
from funcamp._optim.containers import leaves_of
from funcamp._optim.dataflow import Dataflow, followed
from funcamp._optim.decisions import Decisions, OtherAnswers, results_of_paths
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
    form = form_of(step_run.held, step_run.first, step.changing)
    form = form._replace(operations=operations, is_separable=_keeps_apart(flow, step_run))
    if step.changing.shared_names - form.shared.keys():
        form = _with_entries_of_other_paths(step, form, empty)
    if step.changing.forms:
        form = _with_later_forms(step, form, empty)
    # torch's classes treat parameters of all shapes alike.
    if step.separate and form.is_separable and len(params) > 1 and not is_torchs(step.cls):
        form = form._replace(is_separable=_keeps_apart_later(step, form, empty))
    return form


def _with_entries_of_other_paths(step: ClassStep, form: Form, empty: list[Tensor]) -> Form:
    """Return a form with what all parameters share that only other paths of a first step set."""

    def run(decisions: Decisions) -> Form:
        step_run = step.run(empty, empty, None, step.examples("meta"), decisions)
        return form_of(step_run.held, step_run.first, step.changing)

    shared = dict(form.shared)
    with without_modes():
        for other in results_of_paths(run, step.decisions):
            shared = other.shared | shared
    return form._replace(shared=shared)


def _keeps_apart_later(step: ClassStep, form: Form, empty: list[Tensor]) -> bool:
    """Return whether each parameter depends on no other in a later step, whatever its questions are answered.

    A class may couple parameters of some shapes only. Two of each kind show it.
    """
    form, empty = _two_of_each(form, empty)
    grads = [torch.empty_like(param) for param in empty]
    leaves = [_examples(form.leaf_entries(index), param) for index, param in enumerate(empty)]
    state = ClassState(leaves, _examples(entries_in(form.shared), empty[0]))
    groups = [[param, grad, *entries.values()] for param, grad, entries in zip(empty, grads, leaves)]
    hyper = step.examples("meta")

    def keeps_apart(decisions: Decisions) -> bool:
        with without_modes():
            flow, step_run = followed(groups, lambda: step.run(empty, grads, state, hyper, decisions, form))
        return _keeps_apart(flow, step_run)

    natural = step.decisions()
    if not keeps_apart(natural):
        return False
    others = OtherAnswers(natural.questions, None)
    for answers, _ in others:
        decisions = step.decisions(answers)
        try:
            if not keeps_apart(decisions):
                return False
        except Exception:
            continue  # the class says that this does not happen
        others.note(answers, decisions.questions, None)
    return True


def _with_later_forms(step: ClassStep, form: Form, empty: list[Tensor]) -> Form:
    """Return a form with those that the state of each parameter has after later steps, along every path."""
    hyper = step.examples("meta")
    shared = _examples(entries_in(form.shared), empty[0])

    def with_forms_after(form: Form, before: Form, leaves: list[Entries]) -> Form:
        def run(decisions: Decisions) -> Form:
            step_run = step.run(empty, empty, ClassState(leaves, shared), hyper, decisions, before)
            return form_of(step_run.held, Held([], {}), step.changing)

        with without_modes():
            for after in results_of_paths(run, step.decisions):
                form = _with_forms(form, after)
        return form

    with contextlib.suppress(Exception):  # as in `_step`
        form = with_forms_after(form, form, [{} for _ in empty])
    stage = 0
    while stage < form.stage_count:
        before = form.at(stage)
        leaves = [_examples(entries_in(leaf_form), param) for leaf_form, param in zip(before.leaves, empty)]
        form = with_forms_after(form, before, leaves)
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
    later_leaves = tuple([form.later_leaves[index] for index in chosen]) if form.later_leaves else ()
    chosen_form = form._replace(leaves=[form.leaves[index] for index in chosen], later_leaves=later_leaves)
    return chosen_form, [params[index] for index in chosen]


def _keeps_apart(flow: Dataflow, step_run: StepRun) -> bool:
    """Return whether what a run made of each parameter depends on no other."""
    states = [_tree.tensors_in(list(leaves_of(leaf).values())) for leaf in step_run.held.leaves]
    return flow.keeps_apart([[param, *state] for param, state in zip(step_run.params, states)])


def _examples(entries: Mapping[str, Entry], like: Tensor) -> Entries:
    """Return tensors for entries."""
    return {name: zero_of(entry, like) for name, entry in entries.items()}


def _with_forms(form: Form, after: Form) -> Form:
    """Return a form with the forms that the state of each parameter has after a step, if they are others."""
    later_leaves: list[list[dict[str, Any]]] = []
    for index, leaf_form in enumerate(after.leaves):
        stages = form.stages(index)
        is_known = any(leaves_of(known).keys() == leaves_of(leaf_form).keys() for known in stages)
        later_leaves.append(stages[1:] if is_known else [*stages[1:], leaf_form])
    return form._replace(later_leaves=tuple(later_leaves))
