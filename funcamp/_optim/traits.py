"""What an optimizer class keeps and how it steps, found by running it on a few numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._optim.class_state import (
    ChangedConstantError,
    Changing,
    ClassState,
    Held,
    Kind,
    held_by,
    is_plain,
    kind_of,
    leaves_of,
    same,
    snapshot,
    wider,
)
from funcamp._optim.class_step import APPLIED_ENTRY, ClassStep, Stepped
from funcamp._optim.dataflow import Dataflow, followed
from funcamp._optim.decisions import Decisions, Question
from funcamp._optim.first_state import first_state
from funcamp._optim.hyperparameters import example_of, is_dynamic, map_items, without_values
from funcamp._optim.modes import without_modes
from funcamp._optim.instance import instance_of, step_of
from funcamp._optim.wrong_arguments import check_class, refuse_parameters, refuse_schedulers
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
    _elementwise: dict[Any, bool] = field(default_factory=dict, compare=False)

    def elementwise(self, kinds: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> bool:
        """Return whether a step on parameters joined into one equals a step on each.

        So it is if the step of each calls the same operations as that of a vector, and none mixes elements. A class may
        treat a tensor by its dimensions or its size, so each shape is tried, on tensors without values.

        Args:
            kinds: the shapes and dtypes of the parameters.
        """
        if not self.pointwise:
            return False
        for shape, dtype in dict.fromkeys(kinds):
            key = (shape, dtype)
            if key not in self._elementwise:
                size = torch.Size(shape).numel()
                flows = [_flows_without_values(self.step, one, dtype) for one in (shape, (max(size, 2),))]
                self._elementwise[key] = flows[0] is not None and flows[0] == flows[1]
            if not self._elementwise[key]:
                return False
        return True


def _flows_without_values(step: ClassStep, shape: tuple[int, ...], dtype: torch.dtype) -> list[Any] | None:
    """Return the operations of a first step and of a later one on each of its paths; None if one mixes elements."""
    operations: list[Any] = []
    hyper = step.examples("meta")
    with without_modes():
        params = [torch.zeros(shape, dtype=dtype, device="meta")]
        try:
            flow, (first, _) = _followed(step, params, params, None, hyper, step.decisions())
            flows = [flow]
            flow, (_, questions) = _followed(step, first.params, params, first.state, hyper, step.decisions())
            flows.append(flow)
            answers = tuple(question.answer for question in questions)
            for number in range(len(answers)):
                decisions = step.decisions((*answers[:number], not answers[number]))
                flows.append(_followed(step, first.params, params, first.state, hyper, decisions)[0])
        except Exception:  # the class takes no such parameter
            return None
    for flow in flows:
        if not flow.is_pointwise:
            return None
        operations.append(flow.operations)
    return operations


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
    _check_names(cls, hyperparameters, accepted)
    _check_implementation(hyperparameters)
    _refuse_closure(cls)
    dynamic = tuple(name for name, value in hyperparameters.items() if is_dynamic(value))
    for name in dynamic:
        _check_is_no_choice(name, hyperparameters[name], accepted)
    arguments = _constructor_arguments(hyperparameters, accepted)
    # This must run on real numbers, with the formulas of eager mode.
    with without_modes(), as_eager(), torch.random.fork_rng(devices=[]):
        _check_constructor(cls, hyperparameters, arguments, dynamic)
        record = _recorded(cls, arguments)
        step = ClassStep(
            cls, without_values(hyperparameters), arguments, dynamic, _changing(record), asks_divisors=_catches_zero_divisions(cls)
        )
        for name in dynamic:
            _refuse_reads_of(step, name)
        step = _taken_on_every_path(step, record)
        for name in dynamic:
            _refuse_other_results(step, name)
        step = _with_known_comparisons(step)
        is_pointwise, separable, writes_grads = _flow(step, record)
        # torch's classes do the same for every dtype; one that keeps what rounding loses may write for narrow ones only.
        writes_grads = writes_grads or not cls.__module__.startswith("torch.optim.")
        step = replace(step, separable=separable, writes_grads=writes_grads)
        starts_as_recorded = _reproduces_first_step(step, starts_at_zero=False)
        starts_at_zero = not starts_as_recorded and _reproduces_first_step(step, starts_at_zero=True)
        if not (starts_as_recorded or starts_at_zero):
            step = replace(step, first_step_differs=True)
        traits = Traits(step, starts_at_zero, is_pointwise and separable, _entries(step))
        _refuse_other_numbers(traits, record)
    return traits


def _check_names(
    cls: type[torch.optim.Optimizer], hyperparameters: dict[str, Any], accepted: Mapping[str, inspect.Parameter]
) -> None:
    """Raise TypeError for what is no hyperparameter of the class, and for torch's parameters and schedulers."""
    takes_any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    for name, value in hyperparameters.items():
        if name == "params":
            refuse_parameters(cls, value)
        refuse_schedulers(name, value)
        if name in ("self", "params") or not (takes_any_name or name in accepted):
            raise TypeError(f"stateless: {cls.__name__} has no hyperparameter {name}; got {name}={value!r}")


def _check_implementation(hyperparameters: dict[str, Any]) -> None:
    """Raise ValueError for arguments that choose another implementation of the same step."""
    for name in ("fused", "foreach", "differentiable"):
        value = hyperparameters.get(name)
        if is_dynamic(value) or value:
            raise ValueError(
                f"stateless: {name} must be False or None (torch.compile fuses the step; no gradient flows through it);"
                f" got {name}={value!r}"
            )


def _refuse_closure(cls: type[torch.optim.Optimizer]) -> None:
    """Raise TypeError if the class's step needs an argument."""
    step_parameters = list(inspect.signature(cls.step).parameters.values())[1:]  # without self
    required = [parameter.name for parameter in step_parameters if parameter.default is parameter.empty]
    if required:
        raise _impure(
            cls,
            f"its step needs {', '.join(required)}, through which it evaluates the loss and branches on the value on "
            "the host; use it in an ordinary float32 loop, without a scaler, or take an optimizer without a closure",
        )


def _check_is_no_choice(name: str, value: object, accepted: Mapping[str, inspect.Parameter]) -> None:
    """Raise TypeError if a tensor or a schedule is given for an argument that chooses the algorithm."""
    default = accepted[name].default if name in accepted else None
    if isinstance(default, (bool, str)):
        raise TypeError(
            f"stateless: {name} must be a {type(default).__name__}, because it chooses the algorithm; "
            f"got {_tree.brief(value)}"
        )


def _constructor_arguments(
    hyperparameters: dict[str, Any], accepted: Mapping[str, inspect.Parameter]
) -> dict[str, Any]:
    """Return Python values for the class's constructor, with examples for tensors and schedules."""
    arguments = {name: example_of(name, value, accepted) for name, value in hyperparameters.items()}
    for name, value in (("foreach", False), ("fused", None)):
        if name in accepted:
            arguments.setdefault(name, value)
    if "capturable" in accepted:
        # `run_step` sets it for a device; the caller's value is neither needed nor used.
        arguments["capturable"] = False
    return arguments


def _check_constructor(
    cls: type[torch.optim.Optimizer],
    hyperparameters: Mapping[str, Any],
    arguments: Mapping[str, Any],
    dynamic: Iterable[str],
) -> None:
    """Raise if the class refuses its hyperparameters.

    Raises:
        TypeError, ValueError: it does.
    """
    try:
        instance_of(cls, [torch.zeros(2, 2)], dict(arguments))
    except Exception as error:
        if str(error).startswith("stateless:"):
            raise
        error_class = TypeError if isinstance(error, TypeError) else ValueError
        examples = ", ".join([f"{name}={arguments[name]!r}" for name in dynamic])
        examples = f" (with {examples} for tensors and schedules)" if examples else ""
        got = ", ".join([f"{name}={_tree.brief(value)}" for name, value in hyperparameters.items()])
        got = f"; got {got}" if got else ""
        raise error_class(f"stateless: {cls.__name__} refuses its hyperparameters: {error}{examples}{got}") from error


# The class itself, on a few numbers.


class _Inputs(NamedTuple):
    """Arguments of a step."""

    params: list[Tensor]
    grads: list[Tensor]


class _Record(NamedTuple):
    """What an instance of the class does in a few steps."""

    params: list[Tensor]
    """Those before the first step."""
    grads: list[list[Tensor]]
    """Those of each step."""
    results: list[list[Tensor]]
    """The parameters after each step."""
    constructed: Held
    """What the instance holds before the first step."""
    held: list[Held]
    """What it holds after each step."""


#: Steps of a trial. A class that rectifies, as RAdam does, takes another formula from the sixth on.
_STEPS = 12
_SEED = 0
#: A class may take matrices only, and those of one shape together.
_MATRICES = ((2, 3), (3, 2), (2, 3))
_SHAPES = (*_MATRICES, (4,), (2, 2, 2, 1))



def _recorded(cls: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> _Record:
    """Take a few steps with an instance of the class.

    Raises:
        TypeError: it raises.
    """
    # float64, or float32 for a class that mixes parameters with tensors of torch's default dtype.
    for shapes in (_SHAPES, _MATRICES):
        for dtype in (torch.float64, torch.float32):
            try:
                return _record_of(cls, arguments, shapes, dtype)
            except Exception as error:  # noqa: PERF203  any error of the class
                last_error = error
    raise _impure(
        cls,
        f"its step fails on a few numbers ({type(last_error).__name__}: {_first_line(last_error)}); "
        "use it in an ordinary loop with funcamp.GradScaler",
    ) from last_error


def _record_of(
    cls: type[torch.optim.Optimizer], arguments: Mapping[str, Any], shapes: Iterable[tuple[int, ...]], dtype: torch.dtype
) -> _Record:
    params = [_numbers(shape, dtype, offset) for offset, shape in enumerate(shapes)]
    own_params = [torch.nn.Parameter(param.clone()) for param in params]
    torch.manual_seed(_SEED)
    optimizer = instance_of(cls, own_params, dict(arguments))
    record = _Record(params, [], [], snapshot(held_by(optimizer, own_params)), [])
    step = step_of(optimizer)
    for number in range(_STEPS):
        grads = [_numbers(tuple(param.shape), dtype, 10 * number + offset + 3) for offset, param in enumerate(params)]
        for param, grad in zip(own_params, grads):
            param.grad = grad.clone()
        with torch.no_grad():
            step()
        record.grads.append(grads)
        record.results.append([param.detach().clone() for param in own_params])
        record.held.append(snapshot(held_by(optimizer, own_params)))
    return record


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
    """Return a tensor with numbers between -1 and 1, others for each offset."""
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float64).add(0.7 * offset + 0.1).mul(2.3).sin().reshape(shape).to(dtype)


def _changing(record: _Record) -> Changing:
    """Return what changes from step to step."""
    leaves: dict[str, Kind] = {}
    shared: dict[str, Kind] = {}
    names = {_key(name) for held in record.held for name in held.shared.keys() - record.constructed.shared.keys()}
    for before, after in zip(record.held, record.held[1:]):
        for former, held in zip(before.leaves, after.leaves):
            _note_changes(leaves, leaves_of(former), leaves_of(held))
    for before, after in zip([record.constructed, *record.held], record.held):
        names |= {_key(name) for name in _note_changes(shared, leaves_of(before.shared), leaves_of(after.shared))}
    names = {name for name in names if all(is_plain(held.shared.get(name)) for held in record.held)}
    return Changing(leaves, shared, frozenset(names))


def _catches_zero_divisions(cls: type) -> bool:
    """Return whether the code of a class names `ZeroDivisionError`."""
    functions = [value for base in cls.__mro__ for value in vars(base).values()]
    codes = [getattr(inspect.unwrap(function), "__code__", None) for function in functions if callable(function)]
    return any(code is not None and "ZeroDivisionError" in code.co_names for code in codes)


def _note_changes(kinds: dict[str, Kind], before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Note the kinds of the numbers that differ; return the names of everything that differs."""
    changed = [name for name, value in after.items() if name not in before or not same(before[name], value)]
    for name in changed:
        for value in (before.get(name), after[name]):
            kind = kind_of(value)
            if kind is not None and kind != "tensor":
                kinds[name] = wider(kinds.get(name), kind)
    return changed


def _key(name: str) -> str:
    """Return the key of the container in which an entry is."""
    return name.partition("[")[0]


# The step as a function.


def _impure(cls: type, why: str) -> TypeError:
    return TypeError(f"stateless: {cls.__name__} cannot be made pure: {why}")


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else ""


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
    first = step._along_paths(inputs.params, inputs.grads, None, _nothing(inputs.params), hyper)
    other_grads = [grad.cos() for grad in inputs.grads]
    second_run = step.run(first.params, other_grads, first.state, hyper, step.decisions(zeros=zeros))
    second = step._stepped(second_run, step.form(first.params), first.params, first.state, first.state)
    return _tensors(second.params, second.state)


def _nothing(params: list[Tensor]) -> ClassState:
    """Return the state of a class before its first step."""
    return ClassState([{} for _ in params], {})


def _tensors(params: list[Tensor], state: ClassState) -> list[Tensor]:
    """Return parameters and a state in one list."""
    tensors = list(params)
    for entries in (*state.leaves, state.shared):
        tensors += [entries[name] for name in sorted(entries)]
    return tensors


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
    if str(error).startswith("stateless:"):
        raise error
    raise TypeError(
        f"stateless: {name} must be a number, because {step.cls.__name__} uses its value in Python "
        f"({type(error).__name__}: {_first_line(error)}); got a tensor or a schedule: make another optimizer "
        "for another value"
    ) from error


def _taken_on_every_path(step: ClassStep, record: _Record) -> ClassStep:
    """Return the class with all its numbers that change, from two steps on tensors without values, on every path.

    Raises:
        TypeError: a step reads a value, or its state has no one form.
    """
    for _ in range(_LARGEST_COUNT_OF_CHANGES):
        try:
            return _on_every_path(step)
        except Exception as error:
            changed = error.__cause__
            if isinstance(changed, ChangedConstantError) and (changed.is_shared or _may_change(changed)):
                step = _with_change(step, changed, record)
                continue
            if str(error).startswith("stateless:"):
                raise
            raise _impure(
                step.cls,
                "its step fails on tensors without values, as it does if it reads one on the host "
                f"({type(error).__name__}: {_first_line(error)}); "
                "use it in an ordinary loop with funcamp.GradScaler",
            ) from error
    raise _impure(step.cls, "it changes more numbers than can be followed; use it in an ordinary loop")


#: The largest number of entries that are found one by one.
_LARGEST_COUNT_OF_CHANGES = 32


def _on_every_path(step: ClassStep) -> ClassStep:
    """Take two steps on tensors without values; return the class, with whether its parameters step separately."""
    hyper = step.examples("meta")
    question_counts = []
    for count in (1, 2):
        params, grads = (tensors[:count] for tensors in _inputs("meta"))
        asks_for_each = bool(question_counts) and _question_count(step, params, grads, hyper) > question_counts[0]
        if asks_for_each:  # two may have too many paths together
            return replace(step, separate=True)
        first = step._along_paths(params, grads, None, _nothing(params), hyper)
        step._along_paths(first.params, grads, first.state, first.state, hyper)
        question_counts.append(_question_count(step, params, grads, hyper))
    return step


def _question_count(step: ClassStep, params: list[Tensor], grads: list[Tensor], hyper: dict[str, Any]) -> int:
    """Return how many questions two steps ask along one path."""
    decisions, later_decisions = step.decisions(), step.decisions()
    step.run(params, grads, None, hyper, decisions)
    alone = [step._along_paths([param], [grad], None, _nothing([param]), hyper) for param, grad in zip(params, grads)]
    state = ClassState([one.state.leaves[0] for one in alone], alone[0].state.shared)
    step.run([one.params[0] for one in alone], grads, state, hyper, later_decisions)
    return len(decisions.questions) + len(later_decisions.questions)


def _may_change(changed: ChangedConstantError) -> bool:
    """Return whether what has changed is a number, before and after; a tensor of shape () is one."""
    values = (changed.before, changed.after)
    return all(kind_of(value) is not None and (not isinstance(value, Tensor) or value.dim() == 0) for value in values)


def _with_change(step: ClassStep, changed: ChangedConstantError, record: _Record) -> ClassStep:
    """Return the class with one number more that changes."""
    if changed.is_shared:
        names = step.changing.shared_names | {_key(changed.name)}
        step = replace(step, changing=step.changing._replace(shared_names=names), _forms={})
        if not _may_change(changed):
            return step
    kind: Kind = "bool"
    for value in (changed.before, changed.after):
        value_kind = kind_of(value)
        assert value_kind is not None
        kind = wider(kind, "float" if value_kind == "tensor" else value_kind)
    changing = step.changing
    leaves = changing.leaves | {changed.name: wider(changing.leaves.get(changed.name), kind)}
    shared = changing.shared | {changed.name: wider(changing.shared.get(changed.name), kind)}
    if leaves == changing.leaves and shared == changing.shared and not changed.is_shared:
        raise _impure(step.cls, f"its state entry {changed.name!r} is no number after every step; got {changed.after!r}")
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
        effect_of_value = _distance(with_example, expected)
        if _distance(with_tensor, expected) <= max(1e-6, 0.1 * effect_of_value):
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


def _distance(tensors: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference of two lists of tensors, relative to the tensor's largest element."""
    if len(tensors) != len(expected):
        return float("inf")
    distances = [0.0]
    for tensor, reference in zip(tensors, expected):
        if reference.numel() == 0:
            continue
        reference = reference.double()
        tensor = tensor.double()
        largest = reference.abs().max().clamp(min=1e-30)
        distance = float((tensor - reference).abs().max() / largest)
        distances.append(float("inf") if distance != distance else distance)
    return max(distances)


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
    return len(tensors) == len(others) and all(map(_is_same, tensors, others))


def _reproduces_first_step(step: ClassStep, *, starts_at_zero: bool) -> bool:
    """Return whether a step from the state that `init` would give equals the first step without state."""
    step = replace(step, wide=False)
    inputs = _inputs("cpu")
    hyper = step.examples("cpu")
    torch.manual_seed(_SEED)
    state = _first_state(step, inputs.params, hyper, starts_at_zero=starts_at_zero)
    torch.manual_seed(_SEED)
    expected = step._along_paths(inputs.params, inputs.grads, None, state, hyper)
    torch.manual_seed(_SEED)
    stepped = step._along_paths(inputs.params, inputs.grads, state, state, hyper)
    return _are_equal(_tensors(*stepped), _tensors(*expected))


def _first_state(step: ClassStep, params: list[Tensor], hyper: dict[str, Any], *, starts_at_zero: bool) -> ClassState:
    return first_state(step, params, hyper, starts_at_zero=starts_at_zero, by_chunks=False)


def _flow(step: ClassStep, record: _Record) -> tuple[bool, bool, bool]:
    """Return whether no operation mixes the elements of a tensor, whether the step of each parameter is its own, and
    whether gradients are written into.

    Two steps are followed, the second also along each other side of its questions.
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
    answers = tuple(question.answer for question in questions)
    draws = flow.draws
    for number, question in enumerate(questions):
        askers = flow.sources(question.condition)
        decisions = step.decisions((*answers[:number], not answers[number]), truthful=True)
        try:
            other_flow, (other, _) = _followed(step, first.params, grads, state, hyper, decisions)
        except Exception:  # that side never happens, or only with other numbers
            continue
        draws |= other_flow.draws
        writes_grads |= other_flow.wrote_gradients
        is_pointwise &= other_flow.is_pointwise
        is_separable &= len(askers) <= 1 and _is_separable(other_flow, other)
        if askers:  # the others do not notice
            is_separable &= all(_is_same(*both) for both in zip(natural.state.shared.values(), other.state.shared.values()))
            for index in {*range(len(params))} - askers:
                is_separable &= _is_same(natural.params[index], other.params[index])
                both_leaves = natural.state.leaves[index].values(), other.state.leaves[index].values()
                is_separable &= all(_is_same(*both) for both in zip(*both_leaves))
    if draws and questions:
        raise _impure(
            step.cls,
            f"its step draws random numbers, and branches ({questions[0].place}): each side would draw; use it in an "
            "ordinary loop with funcamp.GradScaler",
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
    leaves = [{} for _ in params] if state is None else state.leaves
    grads = [grad.clone() for grad in grads]
    groups = [[param, grad, *entries.values()] for param, grad, entries in zip(params, grads, leaves)]
    form = step.form(params)  # it takes a step of its own, which is not followed

    def run() -> tuple[Stepped, list[Question]]:
        step_run = step.run(params, grads, state, hyper, decisions)
        stepped = step._stepped(step_run, form, params, state, _nothing(params) if state is None else state)
        return stepped, decisions.questions

    flow, results = followed(groups, run)
    flow.wrote_gradients = any(grad._version for grad in grads)
    return flow, results


def _is_separable(flow: Dataflow, stepped: Stepped) -> bool:
    """Return whether each parameter and its state depend on no other, and what all share on none."""
    for number, (param, entries) in enumerate(zip(stepped.params, stepped.state.leaves)):
        if any(flow.sources(tensor) - {number} for tensor in (param, *entries.values())):
            return False
    return not any(flow.sources(tensor) for tensor in stepped.state.shared.values())


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether tensors are equal; NaN equals NaN, of which a path that is not taken may be full."""
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def _entries(step: ClassStep) -> frozenset[str]:
    """Return the names of the entries of a matrix's state."""
    params = _inputs("cpu").params
    leaves = _first_state(step, params, step.examples("cpu"), starts_at_zero=False).leaves
    return frozenset(name for entries in leaves for name in entries if name != APPLIED_ENTRY)


def _refuse_other_numbers(traits: Traits, record: _Record) -> None:
    """Refuse a class whose steps as a function come to other numbers than its own: it keeps state that was not found."""
    step = traits.step
    hyper = step.examples("cpu")
    torch.manual_seed(_SEED)
    params = record.params
    state = first_state(
        step, params, hyper, starts_at_zero=traits.starts_at_zero, by_chunks=False
    )
    torch.manual_seed(_SEED)
    # Of the way that a parameter has gone: of its size, a wrong step would be little.
    largest_distance = 1e-5 if params[0].dtype == torch.float64 else 1e-3
    for grads, expected in zip(record.grads, record.results):
        params, state = step(params, grads, state, hyper)
        way = [result - start for result, start in zip(params, record.params)]
        expected_way = [result - start for result, start in zip(expected, record.params)]
        if _distance(way, expected_way) > largest_distance:
            raise _impure(
                step.cls,
                "its steps from a state that is put into a new instance come to other numbers than its own: it keeps "
                "state elsewhere than in self.state, its group and numbers of its own, or draws random numbers; keep "
                "it in self.state[param]",
            )
