"""Which parameters, and which elements of them, a class's step treats independently of each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from funcamp._optim.arguments import impure, is_own_refusal
from funcamp._optim.class_state import ClassState
from funcamp._optim.class_step import ClassStep, Stepped, empty_state
from funcamp._optim.dataflow import Dataflow, followed
from funcamp._optim.decisions import Answers, Decisions, OtherAnswers, Question
from funcamp._optim.hyperparameters import Hyper
from funcamp._optim.modes import generators_put_back, without_modes
from funcamp._optim.record import grads_of_step
from funcamp._optim.trial import is_equal
from funcamp._trace.host_generators import host_generators, states_of


class Independence(NamedTuple):
    """What a step computes independently of what, as far as a trial shows."""

    is_pointwise: bool
    """Whether no operation mixes the elements of a tensor."""
    is_separable: bool
    """Whether the step of each parameter depends on no other, and what all share on none."""
    writes_grads: bool
    """Whether gradients are written into."""
    thresholds: frozenset[int] = frozenset()
    """The whole numbers with which the steps compare numbers, such as counts."""


#: What is assumed of a class that asks more than can be followed.
_NOTHING_IS_KNOWN = Independence(is_pointwise=False, is_separable=False, writes_grads=True)
#: More questions than these are not followed.
_LARGEST_COUNT_OF_QUESTIONS = 64


class _FollowedRun(NamedTuple):
    """One run of a step with the flow of its data."""

    flow: Dataflow
    stepped: Stepped
    questions: list[Question]
    thresholds: set[int]

    def is_separable(self) -> bool:
        """Return whether each parameter and its state depend on no other, and what all share on none."""
        params, state = self.stepped.params, self.stepped.state
        groups = [[param, *entries.values()] for param, entries in zip(params, state.per_param)]
        return self.flow.is_separable(groups) and not any(map(self.flow.sources, state.shared.values()))


def independence_of(step: ClassStep, params: list[Tensor]) -> Independence:
    """Return what a step on such parameters computes independently of what.

    Two steps are followed, the second also along each other side of its questions.

    Raises:
        TypeError: the step draws random numbers and branches.
    """
    step = replace(step, writes_grads=False)
    hyper = step.examples("cpu")
    first_grads, grads = (grads_of_step(params, number) for number in range(2))
    first = _truthful(step, params, first_grads, None, hyper)
    params, state = first.stepped.params, first.stepped.state
    second = _truthful(step, params, grads, state, hyper)
    if len(second.questions) > _LARGEST_COUNT_OF_QUESTIONS:
        return _NOTHING_IS_KNOWN
    is_separable = first.is_separable() and second.is_separable()
    later_runs = [second]
    others = OtherAnswers(second.questions, second.stepped)
    for answers, stepped_before in others:
        try:
            other = _truthful(step, params, grads, state, hyper, answers)
        except Exception as error:
            if is_own_refusal(error):
                raise
            continue  # that side never happens, or only with other numbers
        others.note(answers, other.questions, other.stepped)
        later_runs.append(other)
        asking_params = other.flow.sources(other.questions[len(answers) - 1].condition)
        is_separable &= len(asking_params) <= 1 and other.is_separable()
        if asking_params:
            is_separable &= _changes_only(asking_params, stepped_before, other.stepped)
    if second.questions and any(run.flow.draws for run in later_runs):
        raise impure(
            step.cls,
            f"its step draws random numbers, and branches ({second.questions[0].location}): each side would draw; use "
            "it in an ordinary loop with funcamp.GradScaler",
        )
    runs = [first, *later_runs]
    return Independence(
        is_pointwise=all(run.flow.is_pointwise for run in runs),
        is_separable=is_separable,
        writes_grads=any(run.flow.wrote_gradients for run in runs),
        thresholds=frozenset().union(*[run.thresholds for run in runs]),
    )


def _changes_only(asking_params: Iterable[int], before: Stepped, after: Stepped) -> bool:
    """Return whether the answer to a question of some parameters changes no other parameter, and nothing shared."""
    if not all(map(is_equal, before.state.shared.values(), after.state.shared.values())):
        return False
    for index in set(range(len(before.params))).difference(asking_params):
        entries_before, entries_after = before.state.per_param[index], after.state.per_param[index]
        is_param_equal = is_equal(before.params[index], after.params[index])
        if not (is_param_equal and all(map(is_equal, entries_before.values(), entries_after.values()))):
            return False
    return True


#: Floats for numbers whose value is not known: no step may depend on them.
_UNKNOWN_EXAMPLES = (math.nan, math.inf, -math.inf)


def _truthful(
    step: ClassStep,
    params: list[Tensor],
    grads: list[Tensor],
    state: ClassState | None,
    hyper: Hyper,
    answers: Answers = (),
) -> _FollowedRun:
    """Return a run with true answers after the given ones.

    Raises:
        TypeError: the class gives a `Number` to a function in C, which reads its float.
    """
    step.form(params)  # here, because finding it may draw random numbers
    runs: list[_FollowedRun] = []
    for unknown_example in _UNKNOWN_EXAMPLES:
        decisions = step.decisions(
            answers, truthful=True, unknown_example=unknown_example, hides_known_examples=bool(answers)
        )
        try:
            with generators_put_back():
                runs.append(_followed(step, params, grads, state, hyper, decisions))
        except (ArithmeticError, ValueError):
            if not runs:
                raise
            raise _reads_in_c(step) from None  # only with this float
        if runs[0].flow.has_nan or runs[-1].flow.operations != runs[0].flow.operations:
            raise _reads_in_c(step)
    return runs[0]


def _reads_in_c(step: ClassStep) -> TypeError:
    return impure(
        step.cls,
        "its step gives a number that changes in training to a function in C: one of math that is imported in the "
        "step or kept in the class, math.fsum, a format, or numpy's; import math where the class is defined, and call "
        "math.sqrt",
    )


def _followed(
    step: ClassStep,
    params: list[Tensor],
    grads: list[Tensor],
    state: ClassState | None,
    hyper: Hyper,
    decisions: Decisions,
) -> _FollowedRun:
    """Run a step once, and follow its data."""
    per_param = [{} for _ in params] if state is None else state.per_param
    grads = [grad.clone() for grad in grads]
    groups = [[param, grad, *entries.values()] for param, grad, entries in zip(params, grads, per_param)]
    form = step.form(params)  # here, because finding a form takes a step, which must not be followed

    def run() -> Stepped:
        step_run = step.run(params, grads, state, hyper, decisions)
        return step.stepped(step_run, form, grads, state, empty_state(params) if state is None else state)

    generators = host_generators()
    states_before = states_of(generators)
    flow, stepped = followed(groups, run)
    flow.draws = flow.draws or states_of(generators) != states_before
    flow.wrote_gradients = any(grad._version for grad in grads)
    return _FollowedRun(flow, stepped, decisions.questions, decisions.thresholds)


def flows_on(step: ClassStep, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Dataflow] | None:
    """Return the flow of data in a first step and in a later one on each side of its questions, on such parameters.

    None if the class takes no such parameters. They have no values.
    """
    hyper = step.examples("meta")
    with without_modes():
        params = [torch.zeros(shape, dtype=dtype, device="meta") for shape in shapes]
        try:
            first = _followed(step, params, params, None, hyper, step.decisions())
            new_params, state = first.stepped.params, first.stepped.state
            second = _followed(step, new_params, params, state, hyper, step.decisions())
            flows = [first.flow, second.flow]
            others = OtherAnswers(second.questions, None)
            for answers, _ in itertools.islice(others, _LARGEST_COUNT_OF_QUESTIONS):
                other = _followed(step, new_params, params, state, hyper, step.decisions(answers))
                flows.append(other.flow)
                others.note(answers, other.questions, None)
        except Exception:
            return None
    return flows
