"""The last trial of a class: a long loop of its own against its steps as a function.

The shorter trials find what a class keeps and how its step can be taken. This one asks whether the result is right: in
many steps, with gradients from small to large, with hyperparameters that change, for parameters by themselves and
joined into one, and at late counts. A loop to step 1000 would take long, so the counts are set forward instead, in the
loop and in the state: to numbers at which classes often change (`_USUAL_THRESHOLDS`), and to those with which this one
compares.

Loops with other kinds of parameters follow later: `kinds.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from funcamp._optim.arguments import impure, is_torchs
from funcamp._optim.class_state import ClassState, Entries
from funcamp._optim.class_step import ClassStep
from funcamp._optim.first_state import first_state
from funcamp._optim.hyperparameters import Hyper
from funcamp._optim.instance import forward_counts
from funcamp._optim.instance_state import Contents
from funcamp._optim.record import SEED, Loop, Record, grads_of_step
from funcamp._optim.tensor_hyperparameters import multiplied
from funcamp._optim.trial import distance

if TYPE_CHECKING:
    from funcamp._optim.traits import Traits

#: Steps before the counts are set forward.
_FIRST_STEPS = 12
#: Steps around each threshold.
_STEPS_AROUND = 3
#: Counts at which the step of many a class changes: a restart, a warm-up, the end of a few epochs.
_USUAL_THRESHOLDS = (15, 20, 100, 1000)
#: At most so many others, the smallest ones, and none above this count.
_LARGEST_COUNT_OF_THRESHOLDS = 6
_LARGEST_THRESHOLD = 10**7
#: Factors of the gradients, one step after another, and of the hyperparameters that change.
_GRADIENT_FACTORS = (1.0, 0.3, 30.0, 1.0, 1e-3, 1.0, 3.0)
_HYPERPARAMETER_FACTORS = (1.0, 0.9, 0.7, 0.8)


class Counts(NamedTuple):
    """What a class counts: by name, what each step adds."""

    per_param: list[dict[str, int]]
    shared: dict[str, int]


class LoopTrial(NamedTuple):
    """What a long loop is made of."""

    params: list[Tensor]
    counts: Counts
    thresholds: list[int]
    """The steps to which the counts are set forward."""


class LoopStep(NamedTuple):
    """A step of a loop."""

    grads: Sequence[Tensor | None]
    results: list[Tensor]
    """The parameters after it."""
    values: Mapping[str, object] = {}
    """The hyperparameters that change, as numbers."""
    skipped_steps: int = 0
    """The steps by which the counts are set forward before it."""


def followed_in_loop(traits: Traits, record: Record, thresholds: Iterable[int]) -> Traits:
    """Return the traits of a class, corrected so that its steps as a function are those of a long loop.

    Raises:
        TypeError: they come to other numbers.
    """
    step = traits.step
    counts = _counts_in(record)
    # torch's classes change at no late count.
    trial = LoopTrial(record.params, counts, [] if is_torchs(step.cls) else _thresholds(counts, thresholds))
    steps = loop_steps(step, trial, step.dynamic)
    assert steps, f"{step.cls.__name__} took no step"  # the record has some with the same numbers

    def is_followed(step: ClassStep, steps: Sequence[LoopStep]) -> bool:
        return follows(step, trial.params, steps, counts, starts_at_zero=traits.starts_at_zero)

    if step.steps_separately and step.separable and not is_followed(step, steps):
        # What all share may depend on the number of the parameters.
        step = replace(step, separable=False, _forms={})
        traits = replace(traits, step=step, pointwise=False)
    if not is_followed(step, steps):
        for name in step.dynamic:
            if not is_followed(step, loop_steps(step, trial, [name])):
                _refuse_unless_constant(step, name, is_followed, trial)
        raise impure(step.cls, WHY_OTHER_NUMBERS)
    _refuse_uses_of_arguments(step, lambda other_step: is_followed(other_step, steps))
    if traits.pointwise:
        traits = replace(traits, pointwise=follows_joined(traits, trial, steps))
    return replace(traits, loop_trial=trial)


def follows_joined(traits: Traits, trial: LoopTrial, steps: Iterable[LoopStep]) -> bool:
    """Return whether the steps of a class come to the results of a loop for parameters joined into one."""
    joined_params = [_joined(trial.params)]
    joined_steps = [one._replace(grads=[_joined(one.grads)], results=[_joined(one.results)]) for one in steps]
    try:
        return follows(traits.step, joined_params, joined_steps, trial.counts, starts_at_zero=traits.starts_at_zero)
    except Exception:
        return False


WHY_OTHER_NUMBERS = (
    "its steps from a state that is put into a new instance come to other numbers than its own: it keeps state "
    "elsewhere than in self.state, its group and numbers of its own, one tensor under two names, or draws random "
    "numbers; keep it in self.state[param]"
)


def _refuse_unless_constant(
    step: ClassStep,
    name: str,
    is_followed: Callable[[ClassStep, Sequence[LoopStep]], bool],
    trial: LoopTrial,
) -> None:
    """Refuse a hyperparameter by name, unless the class is not followed with constant ones either."""
    if is_followed(step, loop_steps(step, trial, [])):
        raise TypeError(
            f"stateless: {name} must be a number, because {step.cls.__name__} reads its value in Python, so "
            "that a tensor has another effect; got a tensor or a schedule: make another optimizer for "
            "another value"
        )


def _refuse_uses_of_arguments(step: ClassStep, is_followed: Callable[[ClassStep], bool]) -> None:
    """Refuse a tensor or a schedule if the class also uses the number with which it is made, which is not known then.

    torch's loop makes the optimizer with a number, and changes that in the parameter group only.
    """
    if step.are_starts_known:
        return
    for name in step.dynamic:
        for factor in (0.9, 1.1):
            other_arguments = {**step.arguments, name: multiplied(step, name, factor)}
            other_step = replace(step, arguments=other_arguments, _forms={})
            try:
                uses_argument = not is_followed(other_step)
            except (ValueError, TypeError, AssertionError):
                continue  # the class does not allow this value
            if uses_argument:
                raise TypeError(
                    f"stateless: {name} must be a number, because {step.cls.__name__} also uses the number that its "
                    "constructor gets, and a tensor or a schedule has none; give the number, and "
                    "funcamp.schedule(optimizer, make, steps=...) a scheduler of torch, which starts from it"
                )
            break


def _joined(tensors: Iterable[Tensor | None]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors if tensor is not None])


# The loop.


def _thresholds(counts: Counts, compared: Iterable[int]) -> list[int]:
    """Return the steps around which a class may change: usual ones, and those at which a count is a compared number."""
    increments = {1, *[value for names in (*counts.per_param, counts.shared) for value in names.values()]}
    steps = {number // increment for number in compared for increment in increments}
    smallest = sorted([number for number in steps if 1 < number <= _LARGEST_THRESHOLD])[:_LARGEST_COUNT_OF_THRESHOLDS]
    return sorted({*_USUAL_THRESHOLDS, *smallest})


def loop_steps(step: ClassStep, trial: LoopTrial, changing_names: Iterable[str]) -> list[LoopStep]:
    """Take the steps of a long loop with the class; none if it takes no such parameters.

    Args:
        step: the class.
        trial: what the loop is made of.
        changing_names: the hyperparameters that change from step to step.
    """
    params, counts, thresholds = trial
    loop = Loop(step.cls, step.arguments, step.set_by_scheduler, params, remembers=True)
    has_counts = bool(counts.shared or any(counts.per_param))
    steps: list[LoopStep] = []
    for number, skipped_steps in enumerate(_skipped_steps(thresholds)):
        factor = _HYPERPARAMETER_FACTORS[number % len(_HYPERPARAMETER_FACTORS)]
        values = {
            name: multiplied(step, name, factor) if name in changing_names else step.arguments[name]
            for name in step.dynamic
        }
        gradient_factor = _GRADIENT_FACTORS[number % len(_GRADIENT_FACTORS)]
        grads = [grad * gradient_factor for grad in grads_of_step(params, number)]
        try:
            if has_counts and skipped_steps:
                forward_counts(loop.optimizer, loop.params, counts.per_param, counts.shared, skipped_steps)
            loop.set(values)
            results = loop.step(grads)
        except Exception:
            break  # the class does not go further, or not with such numbers
        if not all(result.isfinite().all() for result in results):
            break
        steps.append(LoopStep(grads, results, values, skipped_steps if has_counts else 0))
    return steps


def _skipped_steps(thresholds: Sequence[int]) -> list[int]:
    """Return for each step by how much the counts are set forward before it."""
    skipped = [0] * _FIRST_STEPS
    count = _FIRST_STEPS
    for threshold in thresholds:
        first_step = max(count, threshold - _STEPS_AROUND // 2 - 1)
        steps_around = threshold + _STEPS_AROUND // 2 - first_step
        if steps_around > 0:
            skipped += [first_step - count, *[0] * (steps_around - 1)]
            count = first_step + steps_around
    return skipped


def _counts_in(record: Record) -> Counts:
    """Return what a class counts: each number, or tensor with one, to which every step adds the same whole number."""
    per_param = []
    for index in range(len(record.params)):
        per_param.append(_increments([state.per_param[index] for state in record.states]))
    return Counts(per_param, _increments([state.shared for state in record.states]))


def _increments(all_contents: Sequence[Contents]) -> dict[str, int]:
    increments: dict[str, int] = {}
    for name in all_contents[-1]:
        numbers = [_number_in(contents.get(name)) for contents in all_contents[1:]]
        differences = {
            None if before is None or after is None else after - before for before, after in itertools.pairwise(numbers)
        }
        if len(differences) == 1:
            (difference,) = differences
            if difference is not None and difference > 0 and float(difference).is_integer():
                increments[name] = int(difference)
    return increments


def _number_in(value: object) -> float | None:
    """Return a number, or that in a tensor; None for what is none."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


# The steps as a function.


def follows(
    step: ClassStep,
    params: list[Tensor],
    steps: Sequence[LoopStep],
    counts: Counts | None = None,
    *,
    starts_at_zero: bool,
) -> bool:
    """Return whether the steps of a class as a function come to the results of a loop.

    Raises:
        TypeError: a step as a function fails.
    """
    start = params
    limit = _limit_of(_precision_of(steps))
    torch.manual_seed(SEED)
    state = first_state(step, params, _hyper(step, steps[0]), starts_at_zero=starts_at_zero)
    torch.manual_seed(SEED)
    for one in steps:
        if counts is not None and one.skipped_steps:
            state = _forwarded(state, counts, one.skipped_steps)
        stepped = step(params, one.grads, state, _hyper(step, one))
        params, state = stepped.params, stepped.state
        way = [result - before for result, before in zip(params, start)]
        expected_way = [result - before for result, before in zip(one.results, start)]
        # Of the way that a parameter has gone: of its size, a wrong step would be little.
        if distance(way, expected_way) > limit.of_the_way and distance(params, one.results) > limit.of_the_size:
            return False
    return True


class _Limit(NamedTuple):
    """How far a result may be from the expected one: one of the two."""

    of_the_way: float
    of_the_size: float


def _limit_of(dtype: torch.dtype) -> _Limit:
    # Two orders of the same arithmetic differ by a rounding in each step.
    of_the_size = 4 * torch.finfo(dtype).eps
    if dtype.itemsize == 2:
        return _Limit(0.5, of_the_size)
    return _Limit(1e-5 if dtype == torch.float64 else 1e-3, of_the_size)


def _precision_of(steps: Sequence[LoopStep]) -> torch.dtype:
    """Return the dtype in which a class computes: many do in float32, whatever its parameters are."""
    dtype = steps[0].results[0].dtype
    if dtype != torch.float64:
        return dtype
    for one in steps:  # not in all: it may average with a copy in float64
        if all(torch.equal(result, result.float().double()) for result in one.results):
            return torch.float32
    return dtype


def _hyper(step: ClassStep, one: LoopStep) -> Hyper:
    return step.examples("cpu", one.values or None)


def _forwarded(state: ClassState, counts: Counts, step_count: int) -> ClassState:
    """Return a state whose counts are as many steps later."""

    def forwarded(entries: Entries, increments: Mapping[str, int]) -> Entries:
        return {name: value + step_count * increments.get(name, 0) for name, value in entries.items()}

    return ClassState(list(map(forwarded, state.per_param, counts.per_param)), forwarded(state.shared, counts.shared))
