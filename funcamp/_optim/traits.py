"""What an optimizer class keeps and how it steps, found by running it on a few numbers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

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
from funcamp._optim.class_code import catches_zero_divisions, refuse_caught_errors, refuse_identity_of_flags
from funcamp._optim.class_state import (
    ChangedConstantError,
    ClassState,
    Entry,
    aliases_in,
    kind_of,
    leaves_of,
    same,
    wider,
)
from funcamp._optim.class_state import Kind as NumberKind
from funcamp._optim.class_step import APPLIED_ENTRY, ClassStep, Grads, nothing
from funcamp._optim.decisions import every_path
from funcamp._optim.first_state import CHUNK_SIZE, first_state
from funcamp._optim.hyperparameters import is_dynamic, map_items, without_values
from funcamp._optim.independence import flow_of, operations_on
from funcamp._optim.modes import without_modes
from funcamp._optim.record import SEED, Record, changing_in, distance, is_same, key_of, recorded
from funcamp._optim.run import constructed
from funcamp._optim.wrong_arguments import check_class
from funcamp._trace.as_compiled import as_eager


@dataclass(frozen=True)
class Traits:
    """What is known of a class with its hyperparameters."""

    step: ClassStep
    """Its step as a function."""
    starts_at_zero: bool
    """Whether its first step equals a later one from zero state, although it has no state before it (SGD momentum).
    At most one of this and `step.first_step_differs`; neither where a first step records its state, as Adam's does."""
    pointwise: bool
    """Whether each element of a small parameter steps for itself (not so in Muon). A class may do otherwise with larger
    ones: see `elementwise`."""
    entries: frozenset[str]
    """The names of its state entries for a matrix."""
    takes_late: bool = True
    """Whether its step as a function follows it where the first gradient of a parameter comes later than others'."""
    _operations: dict[Any, list[Any] | None] = field(default_factory=dict, compare=False)

    def elementwise(self, kinds: Iterable[Kind]) -> bool:
        """Return whether a step on parameters joined into one equals a step on each.

        So it is if the step of each calls the same operations as that of the joined one, and none mixes elements. A
        class may treat a tensor by its dimensions or its size, so each shape is tried, on tensors without values.

        Args:
            kinds: those of the parameters.
        """
        if not self.pointwise:
            return False
        for kind in dict.fromkeys(kinds):
            operations = self._operations_on(kind.shape, kind.dtype)
            if operations is None or operations != self._operations_on((kind.joined_size,), kind.dtype):
                return False
        return True

    def _operations_on(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Any] | None:
        key = (shape, dtype)
        if key not in self._operations:
            self._operations[key] = operations_on(self.step, [shape], dtype)
        return self._operations[key]

    def first_state(self, params: list[Tensor], hyper: dict[str, Any]) -> ClassState:
        """Return the state of parameters before the first step."""

        def by_chunks(param: Tensor) -> bool:
            return self.elementwise([Kind(tuple(param.shape), param.dtype, CHUNK_SIZE)])

        return first_state(self.step, params, hyper, starts_at_zero=self.starts_at_zero, by_chunks=by_chunks)


class Kind(NamedTuple):
    """A parameter in flat storage."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    joined_size: int
    """The number of elements of the group that it is in."""


def probe(cls: type[torch.optim.Optimizer], hyperparameters: dict[str, Any]) -> Traits:
    """Find a class's traits, or raise with the reason why it cannot be used.

    Raises:
        TypeError: as in `stateless`.
        ValueError: as in `stateless`.
    """
    check_class(cls)
    key = _key_of(cls, hyperparameters)
    if key is None or key not in _known_traits:
        traits = _probe(cls, hyperparameters)
        if key is None:
            return traits
        if len(_known_traits) >= _LARGEST_COUNT_OF_TRAITS:
            _known_traits.clear()
        _known_traits[key] = traits
    return _known_traits[key]


#: The traits of classes with hyperparameters: a trial takes as long as some hundred steps.
_known_traits: dict[Any, Traits] = {}
_LARGEST_COUNT_OF_TRAITS = 256


def _key_of(cls: type, hyperparameters: Mapping[str, Any]) -> Any:
    """Return what decides the traits; None if it cannot be hashed."""

    def typed(_: str, item: object) -> object:
        return type(item), None if is_dynamic(item) else item

    items = {name: map_items(typed, name, value) for name, value in without_values(hyperparameters).items()}
    key = (cls, torch.get_default_dtype(), *[(name, type(value), value) for name, value in items.items()])
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _probe(cls: type[torch.optim.Optimizer], hyperparameters: dict[str, Any]) -> Traits:
    """Find a class's traits by running it."""
    accepted = inspect.signature(cls.__init__).parameters
    check_names(cls, hyperparameters, accepted)
    check_implementation(hyperparameters)
    refuse_closure(cls)
    dynamic = tuple(name for name, value in hyperparameters.items() if is_dynamic(value))
    for name in dynamic:
        check_is_no_choice(name, hyperparameters[name], accepted)
    arguments = constructor_arguments(hyperparameters, accepted)
    # This must run on real numbers, with the formulas of eager mode.
    with without_modes(), as_eager(), torch.random.fork_rng(devices=[]):
        check_constructor(cls, hyperparameters, arguments, dynamic)
        record = recorded(cls, arguments)
        step = ClassStep(
            cls,
            without_values(hyperparameters),
            arguments,
            dynamic,
            changing_in(record),
            asks_divisors=catches_zero_divisions(cls),
        )
        _refuse_choices_of_constructor(step)
        for name in dynamic:
            _refuse_reads_of(step, name)
        step = _taken_on_every_path(step)
        for name in {key_of(name) for name in step.changing.shared_names} & set(dynamic):
            raise TypeError(
                f"stateless: {name} must be a number, because {cls.__name__} changes it; got a tensor or a schedule"
            )
        _refuse_new_aliases(step, record)
        refuse_caught_errors(cls)
        refuse_identity_of_flags(cls, step.changing)
        for name in dynamic:
            _refuse_other_results(step, name)
        step = _with_known_comparisons(step)
        is_pointwise, separable, writes_grads = flow_of(step, record)
        # torch's classes do the same for every dtype; others may write for narrow ones only.
        writes_grads = writes_grads or not is_torchs(cls)
        step = replace(step, separable=separable, writes_grads=writes_grads)
        starts_as_recorded = _reproduces_first_step(step, starts_at_zero=False)
        starts_at_zero = not starts_as_recorded and _reproduces_first_step(step, starts_at_zero=True)
        if not (starts_as_recorded or starts_at_zero):
            step = replace(step, first_step_differs=True)
        if step.changing.forms:  # two steps do not show what it does in later ones
            step = replace(step, separable=False)
        is_pointwise = is_pointwise and step.separable and _has_no_places(step, record)
        if not is_torchs(cls):
            step = replace(step, known_beginnings=_beginnings(step, record))
        traits = Traits(step, starts_at_zero, is_pointwise, _entries(step))
        _refuse_other_numbers(traits, record)
        try:
            takes_late = _follows(traits, record.params, record.late_grads, record.late_results)
        except Exception:
            takes_late = False
    return replace(traits, takes_late=takes_late)


class _Inputs(NamedTuple):
    """Arguments of a step."""

    params: list[Tensor]
    grads: list[Tensor]


def _inputs(device: str, dtype: torch.dtype = torch.float32) -> _Inputs:
    """Return two matrices, and other numbers as their gradients."""
    numbers = torch.linspace(-1.0, 1.5, 6, device=device, dtype=dtype)
    wide = numbers.reshape(2, 3)
    tall = numbers.reshape(3, 2)
    return _Inputs(params=[wide, tall.cos()], grads=[wide.sin(), tall.exp()])


def _two_steps(
    step: ClassStep, inputs: _Inputs, values: Mapping[str, Any] | None = None, zeros: frozenset[str] = frozenset()
) -> list[Tensor]:
    """Return the parameters and the state after two steps along the path that the numbers of the trial propose.

    Args:
        step: the class.
        inputs: those of the first step; the second has other gradients, so that it changes all of the state.
        values: of the hyperparameters that are tensors; the others are Python numbers. By default all dynamic ones are
            tensors, with their examples as values.
        zeros: as in `Decisions`.
    """
    hyper = step.examples(inputs.params[0].device.type, values)
    first = step._along_paths(inputs.params, inputs.grads, None, nothing(inputs.params), hyper)
    other_grads = [grad.cos() for grad in inputs.grads]
    second_run = step.run(first.params, other_grads, first.state, hyper, step.decisions(zeros=zeros))
    second = step._stepped(second_run, step.form(first.params), other_grads, first.state, first.state)
    return _tensors(second.params, second.state)


def _tensors(params: list[Tensor], state: ClassState) -> list[Tensor]:
    """Return parameters and a state in one list."""
    tensors = list(params)
    for entries in (*state.leaves, state.shared):
        tensors += [entries[name] for name in sorted(entries)]
    return tensors


def _refuse_choices_of_constructor(step: ClassStep) -> None:
    """Refuse a tensor or a schedule by whose value the constructor chooses: it would be by the example for ever."""

    def leaves_if(flipped: int | None) -> tuple[dict[str, Any], list[str]]:
        decisions = step.decisions(flipped=flipped)
        held = constructed(step.cls, step.arguments, step.examples("meta"), _inputs("meta").params, decisions)
        leaves = {name: repr(leaf) if kind_of(leaf) else leaf for name, leaf in leaves_of(held.shared).items()}
        return leaves, decisions.compared_in_constructor

    if not step.dynamic:
        return
    leaves, labels = leaves_if(None)
    again, _ = leaves_if(None)
    comparable = {name for name in leaves.keys() & again.keys() if same(leaves[name], again[name])}
    for number, label in enumerate(labels):
        try:
            others, _ = leaves_if(number)
        except Exception:
            continue  # it allows no such value
        if any(name not in others or not same(leaves[name], others[name]) for name in comparable):
            raise TypeError(
                f"stateless: {key_of(label)} must be a number, because the constructor of {step.cls.__name__} chooses "
                "by its value; got a tensor or a schedule: make another optimizer for another value"
            )


def _refuse_new_aliases(step: ClassStep, record: Record) -> None:
    """Refuse a class that keeps one tensor under two names from some later step on: in a state they are two."""
    hyper = step.examples("meta")
    for param in _inputs("meta").params:
        params, grads = [param], [torch.empty_like(param)]
        first = step._along_paths(params, grads, None, nothing(params), hyper)
        run = functools.partial(step.run, first.params, grads, first.state, hyper)
        for step_run in every_path(run, step.decisions).values():
            for names in aliases_in(step_run.held, step_run.params) - record.aliases:
                raise impure(
                    step.cls,
                    f"it keeps one tensor as {' and as '.join(sorted(names))} from some later step on; clone it",
                )


def _refuse_reads_of(step: ClassStep, name: str) -> None:
    """Refuse one hyperparameter by name if steps fail when it is a tensor and do not fail when it is a number."""

    def error_with(values: dict[str, Any]) -> Exception | None:
        # Forms are of hyperparameters that are all tensors, or none.
        trial = replace(step, dynamic=tuple(values), _forms={})
        try:
            _two_steps(trial, _inputs("meta"), values=values)
        except Exception as error:
            return error
        return None

    error = error_with({name: step.arguments[name]})
    if error is None or error_with({}) is not None:
        return
    if is_own_refusal(error):
        raise error
    raise TypeError(
        f"stateless: {name} must be a number, because {step.cls.__name__} uses its value in Python "
        f"({type(error).__name__}: {first_line(error)}); got a tensor or a schedule: make another optimizer "
        "for another value"
    ) from error


def _taken_on_every_path(step: ClassStep) -> ClassStep:
    """Return the class with all its numbers that change, from two steps on tensors without values, on every path.

    Raises:
        TypeError: a step reads a value, or its state has no one form.
    """
    for _ in range(_LARGEST_COUNT_OF_CHANGES):
        try:
            return _on_every_path(step)
        except Exception as error:
            changed = error.__cause__
            if isinstance(changed, ChangedConstantError) and changed.is_of_another_form and not step.changing.forms:
                step = replace(step, changing=step.changing._replace(forms=True), _forms={})
                continue
            if isinstance(changed, ChangedConstantError) and (changed.is_shared or _may_change(changed)):
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


def _on_every_path(step: ClassStep) -> ClassStep:
    """Take two steps on tensors without values; return the class, with whether its parameters step separately."""
    hyper = step.examples("meta")
    question_counts: list[int] = []
    for count in (1, 2):
        params, grads = (tensors[:count] for tensors in _inputs("meta"))
        asks_for_each = bool(question_counts) and _question_count(step, params, grads, hyper) > question_counts[0]
        if asks_for_each:  # two may have too many paths together
            return replace(step, separate=True)
        first = step._along_paths(params, grads, None, nothing(params), hyper)
        step._along_paths(first.params, grads, first.state, first.state, hyper)
        question_counts.append(_question_count(step, params, grads, hyper))
    return step


def _question_count(step: ClassStep, params: list[Tensor], grads: list[Tensor], hyper: dict[str, Any]) -> int:
    """Return how many questions two steps ask along one path."""
    decisions, later_decisions = step.decisions(), step.decisions()
    step.run(params, grads, None, hyper, decisions)
    alone = [step._along_paths([param], [grad], None, nothing([param]), hyper) for param, grad in zip(params, grads)]
    state = ClassState([one.state.leaves[0] for one in alone], alone[0].state.shared)
    step.run([one.params[0] for one in alone], grads, state, hyper, later_decisions)
    return len(decisions.questions) + len(later_decisions.questions)


def _may_change(changed: ChangedConstantError) -> bool:
    """Return whether what has changed is a number, before and after; a tensor of shape () is one."""
    values = [value for value in (changed.before, changed.after) if not isinstance(value, Entry)]
    return all(kind_of(value) is not None and (not isinstance(value, Tensor) or value.numel() == 1) for value in values)


def _with_change(step: ClassStep, changed: ChangedConstantError) -> ClassStep:
    """Return the class with one number more that changes."""
    if changed.is_shared:
        names = step.changing.shared_names | {key_of(changed.name)}
        step = replace(step, changing=step.changing._replace(shared_names=names), _forms={})
        if not _may_change(changed):
            return step
    kind: NumberKind = "bool"
    for value in (changed.before, changed.after):
        value_kind = "float" if isinstance(value, Entry) else kind_of(value)
        assert value_kind is not None
        kind = wider(kind, "float" if value_kind == "tensor" else value_kind)
    changing = step.changing
    leaves = changing.leaves | {changed.name: wider(changing.leaves.get(changed.name), kind)}
    shared = changing.shared | {changed.name: wider(changing.shared.get(changed.name), kind)}
    if leaves == changing.leaves and shared == changing.shared and not changed.is_shared:
        raise impure(step.cls, f"its state entry {changed.name!r} is no number after every step; got {changed.after!r}")
    return replace(step, changing=changing._replace(leaves=leaves, shared=shared), _forms={})


def _refuse_other_results(step: ClassStep, name: str) -> None:
    """Refuse a hyperparameter if a tensor with a value does not do what the number does.

    The value is not the example, which a class uses where it takes the float out of a `Number` in C. The inputs are
    float64 if they can be, so that a rounding is small beside the effect of the value.
    """
    inputs = _precise_inputs(step)
    with_numbers = replace(step, dynamic=(), _forms={})
    for factor in (0.9, 1.1):
        other_value = _multiplied(step, name, factor)
        with_other_number = replace(with_numbers, arguments=step.arguments | {name: other_value}, _forms={})
        try:
            expected = _two_steps(with_other_number, inputs, values={})
        except (ValueError, TypeError, AssertionError):
            continue  # the class does not allow this value
        with_example = _two_steps(with_numbers, inputs, values={})
        with_tensor = _two_steps(replace(step, dynamic=(name,), _forms={}), inputs, values={name: other_value})
        # If the step used the example in place of the tensor, it would miss the whole effect of the value. The limit
        # 1e-6 is for a value without effect.
        effect_of_value = distance(with_example, expected)
        if distance(with_tensor, expected) <= max(1e-6, 0.1 * effect_of_value):
            return
        raise TypeError(
            f"stateless: {name} must be a number, because {step.cls.__name__} reads its value in Python, so "
            "that a tensor has another effect; got a tensor or a schedule: make another optimizer for "
            "another value"
        )


def _precise_inputs(step: ClassStep) -> _Inputs:
    """Return inputs in float64, or in float32 for a class that mixes them with tensors of torch's default dtype."""
    inputs = _inputs("cpu", torch.float64)
    try:
        _two_steps(step, inputs)
    except RuntimeError:
        return _inputs("cpu")
    return inputs


def _multiplied(step: ClassStep, name: str, factor: float) -> Any:
    """Return the example of a hyperparameter times a factor; of a tuple only the items that are dynamic."""

    def multiply(_: str, item: object, number: float) -> float:
        return number * factor if is_dynamic(item) else number

    return map_items(multiply, name, step.hyperparameters[name], step.arguments[name])


def _with_known_comparisons(step: ClassStep) -> ClassStep:
    """Return the class with the hyperparameters whose value 0 is no other formula, though it compares them with 0.

    For such a hyperparameter a step with the tensor 0 in the formula for other values equals a step in which the
    comparison with 0 is true.
    """
    inputs = _precise_inputs(step)
    hyper = step.examples("cpu")
    decisions = step.decisions()
    step.run(inputs.params, inputs.grads, None, hyper, decisions)
    in_use: set[str] = set()
    for label in sorted(decisions.compared_with_zero):
        values = _with_zero(step, label)
        for_others = replace(step, in_use=frozenset([label]))
        try:
            with_zero = _two_steps(step, inputs, values, frozenset([label]))
            is_same = _are_equal(_two_steps(for_others, inputs, values), with_zero)
        except TypeError:  # with 0 the class keeps other entries
            continue
        if is_same:
            in_use.add(label)
    return replace(step, in_use=frozenset(in_use))


def _with_zero(step: ClassStep, zero_label: str) -> dict[str, Any]:
    """Return the examples of the dynamic hyperparameters, with 0 for the one with this label."""

    def value_of(label: str, number: float) -> float:
        return 0.0 if label == zero_label else number

    return {name: map_items(value_of, name, step.arguments[name]) for name in step.dynamic}


def _are_equal(tensors: list[Tensor], others: list[Tensor]) -> bool:
    return len(tensors) == len(others) and all(map(is_same, tensors, others))


def _reproduces_first_step(step: ClassStep, *, starts_at_zero: bool) -> bool:
    """Return whether a step from the state that `init` would give equals the first step without state.

    It is asked of parameters that begin together, and of those that begin when others have taken a few steps.
    """
    step = replace(step, wide=False)
    inputs = _inputs("cpu")
    hyper = step.examples("cpu")
    torch.manual_seed(SEED)
    state = first_state(step, inputs.params, hyper, starts_at_zero=starts_at_zero)

    def is_reproduced(before: ClassState | None, from_first: ClassState) -> bool:
        torch.manual_seed(SEED)
        expected = step._along_paths(inputs.params, inputs.grads, before, from_first, hyper)
        torch.manual_seed(SEED)
        stepped = step._along_paths(inputs.params, inputs.grads, from_first, from_first, hyper)
        return _are_equal(_tensors(stepped.params, stepped.state), _tensors(expected.params, expected.state))

    if not is_reproduced(None, state):
        return False
    if not state.shared:
        return True
    later = state
    for _ in range(_STEPS_OF_OTHERS):
        later = step._along_paths(inputs.params, inputs.grads, later, later, hyper).state
    without_leaves = ClassState([{} for _ in inputs.params], later.shared)
    try:
        return is_reproduced(without_leaves, ClassState(state.leaves, later.shared))
    except Exception as error:
        if is_own_refusal(error):
            raise
        return True  # it has nothing for a parameter that begins late, or begins all at once


#: Steps that others have taken before a parameter begins, in a trial.
_STEPS_OF_OTHERS = 3


def _has_no_places(step: ClassStep, record: Record) -> bool:
    """Return whether a step does the same with several parameters as with one: by no index, and by no count of them."""
    param = record.params[0]
    alone, several = (operations_on(step, [tuple(param.shape)] * count, param.dtype) for count in (1, 3))
    return alone is not None and several is not None and {*alone} == {*several}


def _beginnings(step: ClassStep, record: Record) -> frozenset[tuple[object, ...]]:
    """Return the operations of the first steps of the parameters of the trial."""
    params = [param.to(dtype) for param in record.params for dtype in (torch.float32, record.params[0].dtype)]
    return frozenset(step.form([param]).operations for param in params)


def _entries(step: ClassStep) -> frozenset[str]:
    """Return the names of the entries of a matrix's state."""
    params = _inputs("cpu").params
    leaves = first_state(step, params, step.examples("cpu"), starts_at_zero=False).leaves
    return frozenset(name for entries in leaves for name in entries if name != APPLIED_ENTRY)


def _refuse_other_numbers(traits: Traits, record: Record) -> None:
    """Refuse a class whose steps as a function come to other numbers than its own, for state that was not found."""
    if not _follows(traits, record.params, record.grads, record.results):
        raise impure(
            traits.step.cls,
            "its steps from a state that is put into a new instance come to other numbers than its own: it keeps "
            "state elsewhere than in self.state, its group and numbers of its own, or draws random numbers; keep "
            "it in self.state[param]",
        )


def _follows(traits: Traits, params: list[Tensor], all_grads: Sequence[Grads], results: Sequence[list[Tensor]]) -> bool:
    """Return whether steps from some parameters with some gradients come to these results."""
    step = traits.step
    hyper = step.examples("cpu")
    torch.manual_seed(SEED)
    start = params
    state = first_state(step, params, hyper, starts_at_zero=traits.starts_at_zero)
    torch.manual_seed(SEED)
    # Of the way that a parameter has gone: of its size, a wrong step would be little.
    largest_distance = 1e-5 if params[0].dtype == torch.float64 else 1e-3
    for grads, expected in zip(all_grads, results):
        stepped = step(params, grads, state, hyper)
        params, state = stepped.params, stepped.state
        way = [result - before for result, before in zip(params, start)]
        expected_way = [result - before for result, before in zip(expected, start)]
        if distance(way, expected_way) > largest_distance:
            return False
    return True
