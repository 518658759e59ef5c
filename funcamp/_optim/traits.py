"""The trial of a class: it runs on a few numbers, and is refused if its steps as a function come to other numbers.

`_probe` is the list of all trials, in their order; most are in separate files. A trial that fails refuses the class,
with a text that names the class or the hyperparameter. `arguments.impure` makes the error of most refusals.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from funcamp._optim.arguments import (
    check_constructor,
    check_implementation,
    check_is_no_choice,
    check_names,
    constructor_arguments,
    first_line,
    impure,
    is_own_refusal,
    is_torchs,
    refuse_closure,
)
from funcamp._optim.changing_numbers import with_changing_numbers
from funcamp._optim.class_code import catches_zero_divisions, refuse_caught_errors, refuse_identity_of_flags
from funcamp._optim.class_state import ClassState
from funcamp._optim.class_step import ClassStep, empty_state
from funcamp._optim.decisions import results_of_paths
from funcamp._optim.first_state import CHUNK_SIZE, first_state
from funcamp._optim.hyperparameters import Hyper, Signature, argument_of, is_dynamic, map_items, without_values
from funcamp._optim.independence import Independence, flows_on, independence_of
from funcamp._optim.instance import fixed_parts
from funcamp._optim.instance_state import aliases_in, container_of
from funcamp._optim.kinds import Kind, Kinds
from funcamp._optim.long_trial import LoopStep, LoopTrial, followed_in_loop, follows
from funcamp._optim.modes import generators_put_back, without_modes
from funcamp._optim.record import SEED, Record, changing_in, first_change, forms_of, recorded
from funcamp._optim.tensor_hyperparameters import (
    refuse_choices_of_constructor,
    refuse_reads_of,
    without_needless_questions,
)
from funcamp._optim.torch_optim.sgd import APPLIED_ENTRY
from funcamp._optim.trial import Inputs, are_equal, distance, inputs_on, tensors_in
from funcamp._optim.wrong_arguments import check_class
from funcamp._trace.as_compiled import as_eager
from funcamp._trace.python_state import Form as PythonForm


class StoredParam(NamedTuple):
    """A parameter in flat storage."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    joined_size: int
    """The number of elements of the group that it is in."""


@dataclass(frozen=True)
class Traits:
    """What is known of a class with its hyperparameters."""

    step: ClassStep
    """Its step as a function."""
    starts_at_zero: bool
    """Whether its first step equals a later one from zero state, although it has no state before it (SGD momentum).
    At most one of this and `step.first_step_differs`; neither if a first step records its state, as Adam's does."""
    pointwise: bool
    """Whether each element of a small parameter steps for itself (not so in Muon). A class may do otherwise with larger
    ones: see `elementwise`."""
    entries: frozenset[str]
    """The names of its state entries for a matrix."""
    takes_late_gradients: bool = True
    """Whether its step as a function follows it if the first gradient of a parameter comes later than others'."""
    loop_trial: LoopTrial | None = field(default=None, compare=False)
    """The long loop in which its steps as a function were compared."""
    kinds: Kinds = field(default_factory=Kinds, compare=False)
    """The kinds of parameters with which it was tried."""

    def elementwise(self, params: Iterable[StoredParam]) -> bool:
        """Return whether a step on parameters joined into one equals a step on each.

        So it is if the step of each calls the same operations as that of the joined one, and none mixes elements. A
        class may treat a tensor by its dimensions, its size or its place, so all are tried, on tensors without values.

        Args:
            params: all parameters, in their order.
        """
        params = list(params)
        if not self.pointwise or not self.step.ignores_positions(tuple((param.shape, param.dtype) for param in params)):
            return False
        for param in dict.fromkeys(params):
            if not self.kinds.is_pointwise_in(self, param.dtype):
                return False
            calls = self.kinds.calls(self, Kind(param.shape, param.dtype))
            if calls is None or calls != self.kinds.calls(self, Kind((param.joined_size,), param.dtype)):
                return False
        return True

    def first_state(self, params: list[Tensor], hyper: Hyper) -> ClassState:
        """Return the state of parameters before the first step.

        Raises:
            TypeError: the class comes to other numbers with parameters of such a shape or dtype.
        """
        self.kinds.try_all(self, params)

        def can_split(param: Tensor) -> bool:
            return self.elementwise([StoredParam(tuple(param.shape), param.dtype, CHUNK_SIZE)])

        return first_state(self.step, params, hyper, starts_at_zero=self.starts_at_zero, can_split=can_split)


def probe(
    cls: type[torch.optim.Optimizer], hyperparameters: Mapping[str, object], set_by_scheduler: Mapping[str, object]
) -> Traits:
    """Find a class's traits, or raise with the reason why it cannot be used.

    Args:
        cls: the class.
        hyperparameters: those that the user gave, or a scheduler has replaced.
        set_by_scheduler: what a scheduler has added to the parameter group, such as `initial_lr`.

    Raises:
        TypeError: as in `stateless`.
        ValueError: as in `stateless`.
    """
    check_class(cls)
    key = _key_of(cls, hyperparameters, set_by_scheduler)
    if key is None or key not in _known_traits:
        try:
            traits = _probe(cls, hyperparameters, set_by_scheduler)
        except Exception as error:
            if is_own_refusal(error):
                raise
            raise impure(
                cls,
                f"its steps as a function fail ({type(error).__name__}: {first_line(error)}); use it in an ordinary "
                "loop with funcamp.GradScaler",
            ) from error
        if key is None:
            return traits
        if len(_known_traits) >= _LARGEST_COUNT_OF_TRAITS:
            _known_traits.clear()
        _known_traits[key] = traits
    return _known_traits[key]


#: The traits of classes with hyperparameters: a trial takes as long as some hundred steps.
_known_traits: dict[Hashable, Traits] = {}
_LARGEST_COUNT_OF_TRAITS = 256


def _key_of(
    cls: type, hyperparameters: Mapping[str, object], set_by_scheduler: Mapping[str, object]
) -> Hashable | None:
    """Return what decides the traits; None if it cannot be hashed."""

    def typed(_: str, item: object) -> object:
        return type(item), argument_of(item) if is_dynamic(item) else item

    items = {name: map_items(typed, name, value) for name, value in without_values(hyperparameters).items()}
    items |= set_by_scheduler
    key = (cls, torch.get_default_dtype(), *[(name, type(value), value) for name, value in items.items()])
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _probe(
    cls: type[torch.optim.Optimizer], hyperparameters: Mapping[str, object], set_by_scheduler: Mapping[str, object]
) -> Traits:
    """Find a class's traits by running it."""
    accepted = inspect.signature(cls.__init__).parameters
    dynamic = _checked_names(cls, hyperparameters, accepted)
    arguments = constructor_arguments(hyperparameters, accepted)
    # This must run on real numbers, with the formulas of eager mode.
    with without_modes(), as_eager(), generators_put_back():
        # The class by itself.
        check_constructor(cls, hyperparameters, arguments, dynamic)
        record = recorded(cls, arguments, set_by_scheduler)
        step = ClassStep(
            cls,
            without_values(hyperparameters),
            arguments,
            dynamic,
            changing_in(record),
            set_by_scheduler,
            asks_divisors=catches_zero_divisions(cls),
        )
        # The class with tensors for its numbers.
        refuse_choices_of_constructor(step)
        for name in dynamic:
            refuse_reads_of(step, name)
        step = with_changing_numbers(step)
        _refuse_changes_of_hyperparameters(step)
        _refuse_hidden_changes(step, record)
        refuse_caught_errors(cls)
        refuse_identity_of_flags(cls, step.changing)
        # How its steps can be taken.
        step = without_needless_questions(step)
        independence = independence_of(step, record.params)
        step = _with_independence(step, independence)
        step, starts_at_zero = _with_first_step(step, record)
        if step.changing.form_changes:  # two steps do not show what it does in later ones
            step = replace(step, separable=False)
        is_pointwise = independence.is_pointwise and step.separable and _ignores_positions(step, record)
        entries = _entries(step)
        # Its steps as a function, against those of its own loop.
        traits = Traits(step, starts_at_zero, is_pointwise and _are_joined(entries), frozenset(entries))
        traits = replace(traits, takes_late_gradients=_takes_late_gradients(traits, record))
        return followed_in_loop(traits, record, independence.thresholds)


def _checked_names(
    cls: type[torch.optim.Optimizer], hyperparameters: Mapping[str, object], accepted: Signature
) -> tuple[str, ...]:
    """Return the names of the hyperparameters that are tensors or schedules.

    Raises:
        TypeError, ValueError: a name or a value is refused before the class runs.
    """
    check_names(cls, hyperparameters, accepted)
    check_implementation(hyperparameters)
    refuse_closure(cls)
    dynamic = tuple(name for name, value in hyperparameters.items() if is_dynamic(value))
    for name in dynamic:
        check_is_no_choice(name, hyperparameters[name], accepted)
    return dynamic


def _refuse_changes_of_hyperparameters(step: ClassStep) -> None:
    """Refuse a tensor or a schedule for a number that the class itself changes."""
    for name in {container_of(name) for name in step.changing.shared_names} & set(step.dynamic):
        raise TypeError(
            f"stateless: {name} must be a number, because {step.cls.__name__} changes it; got a tensor or a schedule"
        )


def _refuse_hidden_changes(step: ClassStep, record: Record) -> None:
    """Refuse a class that in some later step changes what is not followed, or keeps one tensor under two names."""
    # Not on meta tensors: a class may keep a tensor on the device where it was last used.
    hyper = step.examples("cpu")
    inputs = inputs_on("cpu")
    for params, grads in inputs.one_by_one() if step.steps_separately else [inputs]:
        first = step.along_paths(params, grads, None, empty_state(params), hyper)
        observations: list[_Observation] = []

        def observe(optimizer: torch.optim.Optimizer, observations: list[_Observation] = observations) -> None:
            observations.append(_Observation(optimizer, fixed_parts(optimizer), forms_of(optimizer)))

        run = functools.partial(step.run, first.params, grads, first.state, hyper, observe=observe)
        for step_run in results_of_paths(run, step.decisions):
            for names in aliases_in(step_run.state, step_run.params) - record.aliases:
                both_names = " and as ".join(sorted(names))
                raise impure(step.cls, f"it keeps one tensor as {both_names} from some later step on; clone it")
        for before, after in itertools.pairwise(observations):
            # A run that raises is observed once, so two neighbours may be of two runs.
            change = before.change_to(after) if before.optimizer is after.optimizer else None
            if change is not None:
                raise impure(
                    step.cls,
                    f"some step of it changes {change}, where it is not followed; keep it in self.state[param], in "
                    "the group or in an attribute, made by the first step",
                )


class _Observation(NamedTuple):
    """What no step may change in an instance, as it is before a step or after it."""

    optimizer: torch.optim.Optimizer
    fixed_parts: dict[str, object]
    forms: dict[str, PythonForm]

    def change_to(self, after: _Observation) -> str | None:
        """Return the name of something that has changed; None if nothing has."""
        for name, part in self.fixed_parts.items():
            if name in after.fixed_parts and part != after.fixed_parts[name]:
                return name.partition(" (")[0]
        change = first_change(self.forms, after.forms)
        return None if change is None else change.partition(" (")[0]


def _with_independence(step: ClassStep, independence: Independence) -> ClassStep:
    """Return the class with what its step computes independently."""
    # torch's classes do the same for every dtype; others may write for narrow ones only.
    writes_grads = independence.writes_grads or not is_torchs(step.cls)
    return replace(step, separable=independence.is_separable, writes_grads=writes_grads)


def _with_first_step(step: ClassStep, record: Record) -> tuple[ClassStep, bool]:
    """Return the class with whether its first step differs, and whether its state starts at zero."""
    starts_as_recorded = _reproduces_first_step(step, starts_at_zero=False)
    starts_at_zero = not starts_as_recorded and _reproduces_first_step(step, starts_at_zero=True)
    step = replace(step, first_step_differs=not (starts_as_recorded or starts_at_zero))
    if not is_torchs(step.cls):
        step = replace(step, known_first_operations=_first_operations(step, record))
    return step, starts_at_zero


def _reproduces_first_step(step: ClassStep, *, starts_at_zero: bool) -> bool:
    """Return whether a step from the state that `init` would give equals the first step without state."""
    # A state may be made from the first gradient, with a bound that small ones do not reach.
    all_inputs = [inputs_on("cpu"), inputs_on("cpu").with_gradients_times(100.0)]
    trials = [trial for inputs in all_inputs for trial in (inputs.one_by_one() if step.steps_separately else [inputs])]
    distances = [0.0 if trial.grads[0].abs().max() < 10 else 1e-6 for trial in trials]
    return all(
        _reproduces_first_step_of(step, trial, largest_distance, starts_at_zero=starts_at_zero)
        for trial, largest_distance in zip(trials, distances)
    )


def _reproduces_first_step_of(
    step: ClassStep, inputs: Inputs, largest_distance: float, *, starts_at_zero: bool
) -> bool:
    """Return this for parameters that begin together, and for those that begin when others have taken a few steps."""
    step = replace(step, wide_counters=False)
    hyper = step.examples("cpu")
    torch.manual_seed(SEED)
    state = first_state(step, inputs.params, hyper, starts_at_zero=starts_at_zero)

    def is_reproduced(before: ClassState | None, from_first: ClassState) -> bool:
        torch.manual_seed(SEED)
        expected = step.along_paths(inputs.params, inputs.grads, before, from_first, hyper)
        torch.manual_seed(SEED)
        stepped = step.along_paths(inputs.params, inputs.grads, from_first, from_first, hyper)
        results, expected_results = [tensors_in(one.params, one.state) for one in (stepped, expected)]
        # Large gradients may round otherwise.
        return are_equal(results, expected_results) or distance(results, expected_results) < largest_distance

    if not is_reproduced(None, state):
        return False
    if not state.shared:
        return True
    later = state
    for _ in range(_STEPS_OF_OTHERS):
        later = step.along_paths(inputs.params, inputs.grads, later, later, hyper).state
    only_shared = ClassState([{} for _ in inputs.params], later.shared)
    try:
        return is_reproduced(only_shared, ClassState(state.per_param, later.shared))
    except Exception as error:
        if is_own_refusal(error):
            raise
        return True  # the class fails for a parameter that begins late, or begins all at once


#: Steps that others have taken before a parameter begins, in a trial.
_STEPS_OF_OTHERS = 3


def _ignores_positions(step: ClassStep, record: Record) -> bool:
    """Return whether a step does the same with several parameters as with one: by no index, and by no count of them."""
    param = record.params[0]
    flows_of_one, flows_of_three = (flows_on(step, [tuple(param.shape)] * count, param.dtype) for count in (1, 3))
    if flows_of_one is None or flows_of_three is None:
        return False
    calls_of_one = {call for flow in flows_of_one for call in flow.operations}
    return calls_of_one == {call for flow in flows_of_three for call in flow.operations}


def _first_operations(step: ClassStep, record: Record) -> set[tuple[object, ...]]:
    """Return the operations of the first steps of the parameters of the trial."""
    params = [param.to(dtype) for param in record.params for dtype in (torch.float32, record.params[0].dtype)]
    return {step.form([param]).operations for param in params}


def _entries(step: ClassStep) -> dict[str, list[Tensor]]:
    """Return the entries of the state of matrices, by name."""
    params = inputs_on("cpu").params
    state = first_state(step, params, step.examples("cpu"), starts_at_zero=False)
    names = {name for entries in state.per_param for name in entries if name != APPLIED_ENTRY}
    return {name: [entries[name] for entries in state.per_param if name in entries] for name in names}


def _are_joined(entries: dict[str, list[Tensor]]) -> bool:
    """Return whether the entries of matrices can be those of joined ones: like a matrix, or of shape ()."""
    shapes = {tuple(param.shape) for param in inputs_on("cpu").params}
    return all(value.dim() == 0 or tuple(value.shape) in shapes for values in entries.values() for value in values)


def _takes_late_gradients(traits: Traits, record: Record) -> bool:
    """Return whether the class follows itself if the first gradient of a parameter comes later than others'."""
    # A step runs with all parameters in one form: with late gradients they would have several.
    if traits.step.changing.form_changes:
        return False
    if not record.late_results:  # torch's classes, which get parameters with a gradient only
        return True
    late_steps = list(map(LoopStep, record.late_grads, record.late_results))
    try:
        return follows(traits.step, record.params, late_steps, starts_at_zero=traits.starts_at_zero)
    except Exception:
        return False
