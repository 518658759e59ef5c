"""How an optimizer class stores its state, found by running it on a few numbers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._optim.hyperparameters import example_of, is_dynamic, map_items, stand_in
from funcamp._optim.modes import without_modes
from funcamp._optim.number import Comparisons
from funcamp._optim.run import StepRun, number_as_tensor, run_step, state_before_first_step
from funcamp._optim.wrong_arguments import check_class, refuse_parameters, refuse_schedulers


@dataclass(frozen=True)
class Traits:
    """How a class stores its state and runs."""

    arguments: dict[str, Any]
    """Python values for its constructor; an example if the hyperparameter is a tensor or a schedule."""
    dynamic: tuple[str, ...]
    """Names of the hyperparameters that are tensors or schedules."""
    writes_grads: bool
    """Whether it writes into gradients (Muon does)."""
    starts_at_zero: bool
    """Whether its first step equals a later one from zero state, although it has no state before it (SGD momentum).
    At most one of this and `first_step_differs`; neither where a first step records its state, as Adam's does."""
    elementwise: bool
    """Whether a step on several tensors joined into one equals a step on each (not so for Muon)."""
    first_step_differs: bool
    """Whether its first step uses another formula than later ones (SGD with momentum and dampening)."""
    entries: frozenset[str]
    """The names of its state entries for a matrix."""
    branches: tuple[str, ...]
    """Labels of the dynamic hyperparameters whose value 0 is another formula (SGD's momentum)."""


def probe(cls: type[torch.optim.Optimizer], hyperparameters: dict[str, Any]) -> Traits:
    """Find a class's traits, or raise with the reason why it cannot be used.

    Raises:
        TypeError: as in `stateless`.
        ValueError: as in `stateless`.
    """
    check_class(cls)
    accepted = inspect.signature(cls.__init__).parameters
    _check_names(cls, hyperparameters, accepted)
    _check_implementation(hyperparameters)
    _refuse_closure(cls)
    dynamic = tuple(name for name, value in hyperparameters.items() if is_dynamic(value))
    for name in dynamic:
        _check_is_no_choice(name, hyperparameters[name], accepted)
    arguments = _constructor_arguments(hyperparameters, accepted)
    trial = _Trial(cls, hyperparameters, arguments, dynamic)
    with without_modes():  # this must run on real numbers
        untouched_param_group = _untouched_param_group(trial)
        for name in dynamic:
            _refuse_reads_of(trial, name)
        _refuse_host_reads(trial)
        precise_inputs = _inputs("cpu", _widest_dtype(trial))
        for name in dynamic:
            _refuse_other_results(trial, name, precise_inputs)
        branches = _branches(trial, precise_inputs)
        traits = _observe(trial, branches, untouched_param_group)
        _refuse_other_state(trial, precise_inputs)
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


def _untouched_param_group(trial: _Trial) -> dict[str, Any]:
    """Return the parameter group of an instance that has taken no step.

    Raises:
        TypeError, ValueError: the class refuses its hyperparameters.
    """
    try:
        return trial.cls([torch.zeros(2, 2)], **trial.arguments).param_groups[0]
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        error_class = TypeError if isinstance(error, TypeError) else ValueError
        examples = ", ".join([f"{name}={trial.arguments[name]!r}" for name in trial.dynamic])
        examples = f" (with {examples} for tensors and schedules)" if examples else ""
        got = ", ".join([f"{name}={_tree.brief(value)}" for name, value in trial.hyperparameters.items()])
        got = f"; got {got}" if got else ""
        raise error_class(
            f"stateless: {trial.cls.__name__} refuses its hyperparameters: {error}{examples}{got}"
        ) from error


class _Inputs(NamedTuple):
    """Arguments of a step."""

    params: list[Tensor]
    grads: list[Tensor]


@dataclass(frozen=True)
class _Trial:
    """A class with its hyperparameters, to run on a few numbers."""

    cls: type[torch.optim.Optimizer]
    hyperparameters: dict[str, Any]
    arguments: dict[str, Any]
    """As in `Traits`."""
    dynamic: tuple[str, ...]
    """As in `Traits`."""

    def run(
        self,
        inputs: _Inputs,
        states: list[dict[str, Any]] | None = None,
        *,
        values: Mapping[str, Any] | None = None,
        writes_grads: bool = True,
        wide: bool = True,
        comparisons: Comparisons | None = None,
    ) -> StepRun:
        """Take one step.

        Args:
            inputs: the parameters and their gradients.
            states: their states; None for a first step.
            values: for the names of hyperparameters that are tensors, their values; the others are Python numbers. By
                default all dynamic ones are tensors, with their examples as values.
            writes_grads: as in `run_step`.
            wide: as in `run_step`.
            comparisons: as in `run_step`.
        """
        if values is None:
            values = {name: self.arguments[name] for name in self.dynamic}
        device = inputs.params[0].device.type
        hyper = {name: stand_in(self.hyperparameters[name], value, device) for name, value in values.items()}
        return run_step(
            self.cls,
            self.arguments,
            hyper,
            inputs.params,
            inputs.grads,
            states,
            writes_grads=writes_grads,
            wide=wide,
            comparisons=comparisons,
        )


#: What a step raises for tensors that it cannot take: without values, of another dtype, or beside a Python number.
_STEP_ERRORS = (RuntimeError, NotImplementedError, ValueError, TypeError, AssertionError)


def _impure(cls: type, why: str) -> TypeError:
    return TypeError(f"stateless: {cls.__name__} cannot be made pure: {why}")


def _inputs(device: str, dtype: torch.dtype = torch.float32) -> _Inputs:
    """Return two matrices, and other numbers as their gradients."""
    numbers = torch.linspace(-1.0, 1.5, 6, device=device, dtype=dtype)
    wide = numbers.reshape(2, 3)
    tall = numbers.reshape(3, 2)
    return _Inputs(params=[wide, tall.cos()], grads=[wide.sin(), tall.exp()])


def _widest_dtype(trial: _Trial) -> torch.dtype:
    """Return float64, or float32 for a class that mixes parameters with tensors of torch's default dtype."""
    try:
        _two_steps(trial, _inputs("cpu", torch.float64))
    except RuntimeError:
        return torch.float32
    return torch.float64


def _refuse_reads_of(trial: _Trial, name: str) -> None:
    """Refuse one hyperparameter by name if steps fail when it is a tensor and do not fail when it is a number."""

    def error_with(values: dict[str, Any]) -> Exception | None:
        try:
            _two_steps(trial, _inputs("meta"), values=values)
        except _STEP_ERRORS as error:
            return error
        return None

    error = error_with({name: trial.arguments[name]})
    if error is None or error_with({}) is not None:
        return
    if str(error).startswith("stateless:"):
        raise error
    raise TypeError(
        f"stateless: {name} must be a number, because {trial.cls.__name__} uses its value in Python "
        f"({type(error).__name__}: {_first_line(error)}); got a tensor or a schedule: make another optimizer "
        "for another value"
    ) from error


def _two_steps(trial: _Trial, inputs: _Inputs, *, values: Mapping[str, Any] | None = None) -> list[Tensor]:
    """Return the parameters and states after two steps; `values` as in `_Trial.run`."""
    first_run = trial.run(inputs, values=values)
    second_inputs = _Inputs(first_run.params, inputs.grads)
    return _tensors_of(trial.run(second_inputs, _states_of(first_run), values=values))


def _states_of(step_run: StepRun) -> list[dict[str, Any]]:
    """Return the states after a step, with tensors for counters."""
    states = []
    for state, param in zip(step_run.states, step_run.params):
        states.append({name: number_as_tensor(value, param) for name, value in state.items()})
    return states


def _tensors_of(step_run: StepRun) -> list[Tensor]:
    """Return the parameters after a step, and the tensors of its states, each state's by name."""
    tensors = list(step_run.params)
    for state in _states_of(step_run):
        tensors += [state[name] for name in sorted(state) if isinstance(state[name], Tensor)]
    return tensors


def _refuse_other_results(trial: _Trial, name: str, inputs: _Inputs) -> None:
    """Refuse a hyperparameter if a tensor with a value does not do what the number does.

    The value is not the example, which a class uses where it takes the float out of a `Number`, as `math.sqrt` does.
    The inputs are float64 if they can be, so that a rounding is small beside the effect of the value.
    """
    for factor in (0.9, 1.1):
        other_value = _multiplied(trial, name, factor)
        with_other_number = replace(trial, arguments=trial.arguments | {name: other_value})
        try:
            expected = _two_steps(with_other_number, inputs, values={})
        except (ValueError, TypeError, AssertionError):
            continue  # the class does not allow this value
        with_example = _two_steps(trial, inputs, values={})
        with_tensor = _two_steps(trial, inputs, values={name: other_value})
        # If the step used the example in place of the tensor, it would miss the whole effect of the value. The limit
        # 1e-6 is for a value without effect.
        effect_of_value = _distance(with_example, expected)
        if _distance(with_tensor, expected) <= max(1e-6, 0.1 * effect_of_value):
            return
        raise TypeError(
            f"stateless: {name} must be a number, because {trial.cls.__name__} reads its value in Python, so "
            "that a tensor has another effect; got a tensor or a schedule: make another optimizer for "
            "another value"
        )


def _multiplied(trial: _Trial, name: str, factor: float) -> Any:
    """Return the example of a hyperparameter times a factor; of a tuple only the items that are dynamic."""

    def multiply(_: str, item: object, number: float) -> float:
        return number * factor if is_dynamic(item) else number

    return map_items(multiply, name, trial.hyperparameters[name], trial.arguments[name])


def _distance(tensors: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference of two lists of tensors, relative to the tensor's largest element."""
    distances = [0.0]
    for tensor, reference in zip(tensors, expected, strict=True):
        largest = reference.abs().max().clamp(min=1e-30)
        distances.append(float((tensor - reference).abs().max() / largest))
    return max(distances)


def _branches(trial: _Trial, inputs: _Inputs) -> tuple[str, ...]:
    """Return which hyperparameters the step compares with 0 and whose value 0 is another formula.

    For such a hyperparameter a step with the tensor 0 in the formula for other values differs from a step in which the
    comparison with 0 is true.
    """
    class_name = trial.cls.__name__
    comparisons = Comparisons(class_name)
    first_run = trial.run(inputs, comparisons=comparisons)
    labels = comparisons.labels_compared_with_zero
    states = _states_of(first_run)
    # Other gradients, so that each step changes all of the state.
    second_inputs = _Inputs(first_run.params, [grad.cos() for grad in inputs.grads])
    branches = []
    for label in sorted(labels):
        values = _with_zero(trial, label)
        results = []
        for zero_labels in (frozenset[str](), frozenset([label])):
            comparisons = Comparisons(class_name, zero_labels)
            results.append(_tensors_of(trial.run(second_inputs, states, values=values, comparisons=comparisons)))
        if not _are_equal(*results):
            branches.append(label)
    return tuple(branches)


def _with_zero(trial: _Trial, zero_label: str) -> dict[str, Any]:
    """Return the examples of the dynamic hyperparameters, with 0 for the one with this label."""

    def value_of(label: str, number: float) -> float:
        return 0.0 if label == zero_label else number

    return {name: map_items(value_of, name, trial.arguments[name]) for name in trial.dynamic}


def _are_equal(tensors: list[Tensor], others: list[Tensor]) -> bool:
    return len(tensors) == len(others) and all(map(torch.equal, tensors, others))


def _refuse_other_state(trial: _Trial, inputs: _Inputs) -> None:
    """Refuse a class that keeps state elsewhere than in `self.state`: in an attribute, or in another optimizer.

    One instance takes a few steps, and so do new ones that get only the state: they must come to the same numbers.
    """
    instance_params = [param.clone() for param in inputs.params]
    instance = trial.cls(instance_params, **trial.arguments)
    params = inputs.params
    states = None
    for number in range(_STEPS):
        grads = [(grad + number).cos() for grad in inputs.grads]
        for param, grad in zip(instance_params, grads):
            param.grad = grad.clone()
        with torch.no_grad():
            instance.step()
        step_run = trial.run(_Inputs(params, grads), states, values={})
        params = step_run.params
        states = _states_of(step_run)
    if _distance(params, instance_params) > 1e-3:
        raise _impure(
            trial.cls,
            "it keeps state besides self.state, in an attribute or in another optimizer, which a new instance lacks; "
            "keep it in self.state[param]",
        )


#: Steps that find state besides `self.state`; a counter often acts at every fifth.
_STEPS = 6


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else ""


def _refuse_host_reads(trial: _Trial) -> None:
    """Take two steps on tensors without values, on which reading a value raises.

    What is a Python number in the state after the first step is a tensor in the second.
    """
    cls = trial.cls
    try:
        first_run = trial.run(_inputs("meta"))
        states = _states_of(first_run)
        for state in states:
            for name, value in state.items():
                if not isinstance(value, Tensor):
                    raise _impure(
                        cls, f"its state entry {name!r} must be a tensor or a number, and no bool; got {value!r}"
                    )
        _refuse_reads_of_counters(trial, first_run)
        second_run = trial.run(_inputs("meta"), states)
        for before, after in zip(states, second_run.states):
            if before.keys() != after.keys():
                raise _impure(
                    cls,
                    "its state must have the same entries after every step; got "
                    f"{sorted(before)} after the first and {sorted(after)} after the second",
                )
    except _STEP_ERRORS as error:
        if str(error).startswith("stateless:"):
            raise
        raise _impure(
            cls,
            "its step fails on tensors without values, as it does if it reads one on the host "
            f"({type(error).__name__}: {_first_line(error)}); "
            "use it in an ordinary loop with funcamp.GradScaler",
        ) from error


def _refuse_reads_of_counters(trial: _Trial, first_run: StepRun) -> None:
    """Refuse Python numbers in a state by name if a step fails when one is a tensor, and not when all are numbers.

    `first_run` is the first step, on tensors without values.
    """
    number_names = {name: None for state in first_run.states for name in state if not isinstance(state[name], Tensor)}
    if not number_names:
        return

    def error_with(tensor_names: frozenset[str]) -> Exception | None:
        """Return the error of a second step in which these numbers are tensors."""
        states = []
        for numbers, tensors in zip(first_run.states, _states_of(first_run)):
            states.append({name: tensors[name] if name in tensor_names else numbers[name] for name in numbers})
        try:
            trial.run(_Inputs(first_run.params, _inputs("meta").grads), states, wide=False)
        except _STEP_ERRORS as error:
            return error
        return None

    if error_with(frozenset(number_names)) is None:  # that is what happens; a mixture may fail where this does not
        return
    errors = {name: error_with(frozenset([name])) for name in number_names}
    read_names = [name for name, error in errors.items() if error is not None]
    if not read_names or error_with(frozenset()) is not None:
        return
    name = read_names[0]
    error = errors[name]
    assert error is not None
    raise _impure(
        trial.cls,
        f"its step reads state[{name!r}] in Python, a number that is a tensor between steps "
        f"({type(error).__name__}: {_first_line(error)}); begin it as torch.zeros((), device=param.device) and compute "
        "with it as a tensor (x ** 0.5 for math.sqrt(x), torch.where for if), or use the optimizer in an ordinary loop "
        "with funcamp.GradScaler",
    ) from error


def _observe(trial: _Trial, branches: tuple[str, ...], untouched_param_group: dict[str, Any]) -> Traits:
    """Return the traits of a class that can be made pure.

    Args:
        trial: the class.
        branches: what `_branches` returns.
        untouched_param_group: the parameter group of an instance that has taken no step.

    Raises:
        TypeError: the step changes its parameter group.
    """
    inputs = _inputs("cpu")
    versions = [grad._version for grad in inputs.grads]
    without_state = trial.run(inputs, writes_grads=False, wide=False)
    writes_grads = versions != [grad._version for grad in inputs.grads]
    _refuse_changed_param_group(trial, untouched_param_group, without_state.instance.param_groups[0])

    # For most classes the first values in a step with a zero gradient are the state before the first step.
    zero_grads = [torch.zeros_like(grad) for grad in inputs.grads]
    recorded = trial.run(_Inputs(inputs.params, zero_grads), wide=False).first_values

    def reproduces_first_step(starts_at_zero: bool) -> bool:
        """Return whether a step from the state that `init` would give equals the first step without state."""
        states = []
        for first_values, param in zip(recorded, inputs.params):
            states.append(state_before_first_step(first_values, param, starts_at_zero))
        return _have_equal_results(trial.run(_inputs("cpu"), states, wide=False), without_state)

    starts_as_recorded = reproduces_first_step(starts_at_zero=False)
    starts_at_zero = not starts_as_recorded and reproduces_first_step(starts_at_zero=True)
    return Traits(
        arguments=trial.arguments,
        dynamic=trial.dynamic,
        writes_grads=writes_grads,
        starts_at_zero=starts_at_zero,
        elementwise=_is_elementwise(trial),
        first_step_differs=not (starts_as_recorded or starts_at_zero),
        entries=frozenset(name for first_values in recorded for name in first_values),
        branches=branches,
    )


def _refuse_changed_param_group(trial: _Trial, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise TypeError if a step changed its parameter group."""
    for name, value in after.items():
        if name == "params" or name in trial.dynamic:
            continue
        if name not in before or before[name] != value:
            raise _impure(
                trial.cls, f"its step changes {name!r} in its parameter group, which is not state; got {value!r}"
            )


def _have_equal_results(step_run: StepRun, expected_run: StepRun) -> bool:
    """Return whether a step from a state has the parameters and entries of another one."""
    if not _are_equal(expected_run.params, step_run.params):
        return False
    for state, expected_state in zip(step_run.states, expected_run.states):
        for name, value in state.items():
            expected = number_as_tensor(expected_state[name], value).to(value.dtype)
            if not torch.equal(expected, value):
                return False
    return True


def _is_elementwise(trial: _Trial) -> bool:
    """Return whether a step on tensors joined into one equals a step on each; see `Traits`."""
    inputs = _inputs("cpu")
    joined_inputs = _Inputs([_joined(inputs.params)], [_joined(inputs.grads)])
    try:
        joined_run = trial.run(joined_inputs)
    except (RuntimeError, ValueError, TypeError, AssertionError, IndexError):
        return False  # the class takes matrices only
    separate_run = trial.run(inputs)
    joined_param = joined_run.params[0]
    joined_state = joined_run.states[0]
    if not torch.equal(joined_param, _joined(separate_run.params)):
        return False
    if any(state.keys() != joined_state.keys() for state in separate_run.states):
        return False
    for name, entry in joined_state.items():
        joined_entry = number_as_tensor(entry, joined_param)
        separate_entries = [number_as_tensor(state[name], joined_param) for state in separate_run.states]
        expected = separate_entries[0] if joined_entry.dim() == 0 else _joined(separate_entries)
        if joined_entry.shape not in ((), joined_param.shape) or not torch.equal(joined_entry, expected):
            return False
    return True


def _joined(tensors: list[Tensor]) -> Tensor:
    """Return tensors of any shapes as one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
