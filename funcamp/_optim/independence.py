"""Which parameters, and which elements of them, a class's step treats by themselves."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from funcamp._optim.arguments import impure, is_own_refusal
from funcamp._optim.class_state import ClassState
from funcamp._optim.class_step import ClassStep, Stepped, empty_state
from funcamp._optim.dataflow import Dataflow, followed
from funcamp._optim.decisions import Decisions, OtherAnswers, Question
from funcamp._optim.modes import without_modes
from funcamp._optim.record import Record, is_same


def flow_of(step: ClassStep, record: Record) -> tuple[bool, bool, bool]:
    """Return what a step mixes.

    These are: whether no operation mixes the elements of a tensor, whether the step of each parameter is its own, and
    whether gradients are written into. Two steps are followed, the second also along each other side of its questions.
    """
    step = replace(step, writes_grads=False)
    hyper = step.examples("cpu")
    params = record.params
    first_flow, (first, _) = _followed(step, params, record.grads[0], None, hyper, step.decisions(truthful=True))
    grads, state = record.grads[1], first.state
    is_pointwise = first_flow.is_pointwise
    is_separable = _is_separable(first_flow, first)
    flow, (natural, questions) = _followed(step, first.params, grads, state, hyper, step.decisions(truthful=True))
    writes_grads = first_flow.wrote_gradients or flow.wrote_gradients
    is_pointwise &= flow.is_pointwise
    is_separable &= _is_separable(flow, natural)
    if len(questions) > _LARGEST_COUNT_OF_QUESTIONS:
        return False, False, True
    draws = flow.draws
    others = OtherAnswers(questions, natural)
    for answers, before in others:
        decisions = step.decisions(answers, truthful=True)
        try:
            other_flow, (other, other_questions) = _followed(step, first.params, grads, state, hyper, decisions)
        except Exception as error:
            if is_own_refusal(error):
                raise
            continue  # that side never happens, or only with other numbers
        others.note(answers, other_questions, other)
        askers = other_flow.sources(other_questions[len(answers) - 1].condition)
        draws |= other_flow.draws
        writes_grads |= other_flow.wrote_gradients
        is_pointwise &= other_flow.is_pointwise
        is_separable &= len(askers) <= 1 and _is_separable(other_flow, other)
        if askers:  # the others do not notice
            is_separable &= all(
                is_same(*both) for both in zip(before.state.shared.values(), other.state.shared.values())
            )
            for index in {*range(len(params))} - askers:
                is_separable &= is_same(before.params[index], other.params[index])
                both_leaves = before.state.per_param[index].values(), other.state.per_param[index].values()
                is_separable &= all(is_same(*both) for both in zip(*both_leaves))
    if draws and questions:
        raise impure(
            step.cls,
            f"its step draws random numbers, and branches ({questions[0].location}): each side would draw; use "
            "it in an ordinary loop with funcamp.GradScaler",
        )
    return is_pointwise, is_separable, writes_grads


#: More than these are not followed.
_LARGEST_COUNT_OF_QUESTIONS = 64


def _followed(
    step: ClassStep,
    params: list[Tensor],
    grads: list[Tensor],
    state: ClassState | None,
    hyper: dict[str, Any],
    decisions: Decisions,
) -> tuple[Dataflow, tuple[Stepped, list[Question]]]:
    """Return the flow of one run of a step, its results and its questions."""
    leaves = [{} for _ in params] if state is None else state.per_param
    grads = [grad.clone() for grad in grads]
    groups = [[param, grad, *entries.values()] for param, grad, entries in zip(params, grads, leaves)]
    form = step.form(params)  # it takes a step of its own, which is not followed

    def run() -> tuple[Stepped, list[Question]]:
        step_run = step.run(params, grads, state, hyper, decisions)
        stepped = step.stepped(step_run, form, grads, state, empty_state(params) if state is None else state)
        return stepped, decisions.questions

    flow, results = followed(groups, run)
    if flow.has_nan:
        raise impure(
            step.cls,
            "its step gives a number that changes in training to a function in C: one of math that is imported in the "
            "step or kept in the class, or numpy's; import math where the class is defined, and call math.sqrt",
        )
    flow.wrote_gradients = any(grad._version for grad in grads)
    return flow, results


def _is_separable(flow: Dataflow, stepped: Stepped) -> bool:
    """Return whether each parameter and its state depend on no other, and what all share on none."""
    groups = [[param, *entries.values()] for param, entries in zip(stepped.params, stepped.state.per_param)]
    return flow.is_separable(groups) and not any(map(flow.sources, stepped.state.shared.values()))


def operations_on(step: ClassStep, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Any] | None:
    """Return the operations of a first step and of a later one on each side of its questions, on such parameters.

    None if one mixes elements, or the class takes no such parameters. They have no values.
    """
    hyper = step.examples("meta")
    with without_modes():
        params = [torch.zeros(shape, dtype=dtype, device="meta") for shape in shapes]
        try:
            flow, (first, _) = _followed(step, params, params, None, hyper, step.decisions())
            flows = [flow]
            flow, (_, questions) = _followed(step, first.params, params, first.state, hyper, step.decisions())
            flows.append(flow)
            others = OtherAnswers(questions, None)
            for answers, _ in itertools.islice(others, _LARGEST_COUNT_OF_QUESTIONS):
                decisions = step.decisions(answers)
                flow, (_, other_questions) = _followed(step, first.params, params, first.state, hyper, decisions)
                flows.append(flow)
                others.note(answers, other_questions, None)
        except Exception:
            return None
    if not all(flow.is_pointwise for flow in flows):
        return None
    return [operation for flow in flows for operation in flow.operations]
