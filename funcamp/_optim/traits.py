"""How an optimizer class stores its state, found by running it on a few numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._optim.hyperparameters import example, is_dynamic, map_items, stand_in
from funcamp._optim.modes import without_modes
from funcamp._optim.number import Use
from funcamp._optim.run import as_tensor, first_values, run_step
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
    """Whether its first step equals a later one from zero state, although it has no state before it (SGD momentum)."""
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
    open_ended = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    for name, value in hyperparameters.items():
        if name == "params":
            refuse_parameters(cls, value)
        refuse_schedulers(name, value)
        if name in ("self", "params") or not (open_ended or name in accepted):
            raise TypeError(f"stateless: {cls.__name__} has no hyperparameter {name}; got {name}={value!r}")
    for name in ("fused", "foreach", "differentiable"):
        value = hyperparameters.get(name)
        if is_dynamic(value) or value:
            raise ValueError(
                f"stateless: {name} must be False or None (torch.compile fuses the step; no gradient flows through it);"
                f" got {name}={value!r}"
            )
    required = [p.name for p in list(inspect.signature(cls.step).parameters.values())[1:] if p.default is p.empty]
    if required:
        raise _impure(
            cls,
            f"its step needs {', '.join(required)}, through which it evaluates the loss and branches on the value on "
            "the host; use it in an ordinary float32 loop, without a scaler, or take an optimizer without a closure",
        )
    dynamic = tuple(name for name, value in hyperparameters.items() if is_dynamic(value))
    for name in dynamic:
        default = accepted[name].default if name in accepted else None
        if isinstance(default, (bool, str)):
            raise TypeError(
                f"stateless: {name} must be a {type(default).__name__}, because it chooses the algorithm; "
                f"got {_tree.brief(hyperparameters[name])}"
            )
    arguments = {name: example(value, name, accepted) for name, value in hyperparameters.items()}
    for name, value in (("foreach", False), ("fused", None)):
        if name in accepted:
            arguments.setdefault(name, value)
    if "capturable" in accepted:
        arguments["capturable"] = (
            False  # `run_step` sets it for a device; the caller's value is neither needed nor used
        )

    def run(numbers: _Numbers, states: Any = None, *, values: Any = None, **options: Any) -> Any:
        params, grads = numbers
        if values is None:
            values = {name: arguments[name] for name in dynamic}
        device = params[0].device.type
        hyper = {name: stand_in(hyperparameters[name], value, device) for name, value in values.items()}
        return run_step(cls, arguments, hyper, params, grads, states, **options)

    with without_modes():  # this must run on real numbers
        try:
            untouched = cls([torch.zeros(2, 2)], **arguments).param_groups[0]
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            examples = ", ".join([f"{name}={arguments[name]!r}" for name in dynamic])
            examples = f" (with {examples} for tensors and schedules)" if examples else ""
            given = ", ".join([f"{name}={_tree.brief(value)}" for name, value in hyperparameters.items()])
            given = f"; got {given}" if given else ""
            raise kind(f"stateless: {cls.__name__} refuses its hyperparameters: {error}{examples}{given}") from error
        for name in dynamic:
            _refuse_reads_of(cls, name, arguments[name], run)
        _refuse_host_reads(cls, run)
        precise = _numbers("cpu", _widest(run))
        for name in dynamic:
            _refuse_other_results(cls, name, hyperparameters[name], arguments, run, precise)
        branches = _branches(cls, arguments, dynamic, run, precise)
        traits = _observe(cls, arguments, dynamic, branches, untouched, run)
        _refuse_other_state(cls, arguments, precise)
        return traits


#: Parameters, and their gradients.
_Numbers = tuple[list[Tensor], list[Tensor]]


def _impure(cls: type, why: str) -> TypeError:
    return TypeError(f"stateless: {cls.__name__} cannot be made pure: {why}")


def _numbers(device: str, dtype: torch.dtype = torch.float32) -> _Numbers:
    base = torch.linspace(-1.0, 1.5, 6, device=device, dtype=dtype)
    return [base.reshape(2, 3), base.reshape(3, 2).cos()], [base.reshape(2, 3).sin(), base.reshape(3, 2).exp()]


def _widest(run: Callable[..., Any]) -> torch.dtype:
    """Return float64, or float32 for a class that mixes parameters with tensors of torch's default dtype."""
    try:
        _two_steps(run, _numbers("cpu", torch.float64))
    except RuntimeError:
        return torch.float32
    return torch.float64


def _refuse_reads_of(cls: type[torch.optim.Optimizer], name: str, value: Any, run: Callable[..., Any]) -> None:
    """Refuse one hyperparameter by name if steps fail with it and do not fail without."""

    def error_with(values: dict[str, Any]) -> Exception | None:
        try:
            _two_steps(run, _numbers("meta"), values=values)
        except (RuntimeError, NotImplementedError, ValueError, TypeError, AssertionError) as error:
            return error
        return None

    error = error_with({name: value})
    if error is None or error_with({}) is not None:
        return
    if str(error).startswith("stateless:"):
        raise error
    raise TypeError(
        f"stateless: {name} must be a number, because {cls.__name__} uses its value in Python "
        f"({type(error).__name__}: {_first_line(error)}); got a tensor or a schedule: make another optimizer "
        "for another value"
    ) from error


def _two_steps(run: Callable[..., Any], numbers: _Numbers, **options: Any) -> list[Tensor]:
    """Return the parameters and states after two steps."""
    params, states, _ = run(numbers, **options)
    tensors = [_state_tensors(state, param) for state, param in zip(states, params)]
    params, states, _ = run((params, numbers[1]), tensors, **options)
    return [*params, *_values(states, params)]


def _state_tensors(state: Any, param: Tensor) -> dict[str, Any]:
    return {name: as_tensor(value, param) for name, value in state.items()}


def _values(states: list[Any], params: list[Tensor]) -> list[Tensor]:
    values = []
    for state, param in zip(states, params):
        tensors = _state_tensors(state, param)
        values += [tensors[name] for name in sorted(tensors) if isinstance(tensors[name], Tensor)]
    return values


def _refuse_other_results(
    cls: type[torch.optim.Optimizer],
    name: str,
    given: Any,
    arguments: dict[str, Any],
    run: Callable[..., Any],
    numbers: _Numbers,
) -> None:
    """Refuse a hyperparameter if a tensor with a value does not do what the number does.

    The value is not the example, which a class uses where it takes the float out of a `Number`, as `math.sqrt` does.
    The numbers are float64 if they can be, so that a rounding is small beside the effect of the value.
    """
    for factor in (0.9, 1.1):

        def changed(_: str, item: Any, number: Any, factor: float = factor) -> Any:
            return number * factor if is_dynamic(item) else number

        other = map_items(changed, name, given, arguments[name])
        try:
            expected = _two_steps(_with(cls, arguments | {name: other}), numbers)
        except (ValueError, TypeError, AssertionError):
            continue  # the class does not allow this value
        before = _two_steps(_with(cls, arguments), numbers)
        as_tensor_values = _two_steps(run, numbers, values={name: other})
        error = _distance(as_tensor_values, expected)
        if error <= max(1e-6, 0.1 * _distance(before, expected)):
            return
        raise TypeError(
            f"stateless: {name} must be a number, because {cls.__name__} reads its value in Python, so "
            "that a tensor has another effect; got a tensor or a schedule: make another optimizer for "
            "another value"
        )


def _with(cls: type[torch.optim.Optimizer], arguments: dict[str, Any]) -> Callable[..., Any]:
    def run(numbers: _Numbers, states: Any = None) -> Any:
        return run_step(cls, arguments, {}, *numbers, states)

    return run


def _distance(values: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference of two lists of tensors, relative to the tensor's largest element."""
    distances = [0.0]
    for value, reference in zip(values, expected, strict=True):
        largest = reference.abs().max().clamp(min=1e-30)
        distances.append(float((value - reference).abs().max() / largest))
    return max(distances)


def _branches(
    cls: type[torch.optim.Optimizer],
    arguments: dict[str, Any],
    dynamic: tuple[str, ...],
    run: Callable[..., Any],
    numbers: _Numbers,
) -> tuple[str, ...]:
    """Return which hyperparameters the step compares with 0 and whose value 0 is another formula."""
    use = Use(cls.__name__)
    params, states, _ = run(numbers, use=use)
    tensors = [_state_tensors(state, param) for state, param in zip(states, params)]
    grads = [grad.cos() for grad in numbers[1]]  # others, so that each step changes all of the state
    found = []
    for asked in sorted(use.asked):

        def zeroed(label: str, value: Any, asked: str = asked) -> Any:
            return 0.0 if label == asked else value

        values = {name: map_items(zeroed, name, arguments[name]) for name in dynamic}
        results = []
        for unused in (frozenset[str](), frozenset([asked])):
            new, after, _ = run((params, grads), tensors, values=values, use=Use(cls.__name__, unused))
            results.append([*new, *_values(after, new)])
        used, unused_results = results
        same = len(used) == len(unused_results)
        if not same or not all(torch.equal(a, b) for a, b in zip(used, unused_results)):
            found.append(asked)
    return tuple(found)


def _refuse_other_state(cls: type[torch.optim.Optimizer], arguments: dict[str, Any], numbers: _Numbers) -> None:
    """Refuse a class that keeps state elsewhere than in `self.state`: in an attribute, or in another optimizer.

    One instance takes a few steps, and so do new ones that get only the state: they must come to the same numbers.
    """
    own = [param.clone() for param in numbers[0]]
    instance = cls(own, **arguments)
    params, states = numbers[0], None
    for number in range(_STEPS):
        grads = [(grad + number).cos() for grad in numbers[1]]
        for param, grad in zip(own, grads):
            param.grad = grad.clone()
        with torch.no_grad():
            instance.step()
        params, after, _ = run_step(cls, arguments, {}, params, grads, states)
        states = [_state_tensors(state, param) for state, param in zip(after, params)]
    if _distance(params, own) > 1e-3:
        raise _impure(
            cls,
            "it keeps state besides self.state, in an attribute or in another optimizer, which a new instance lacks; "
            "keep it in self.state[param]",
        )


#: Steps that find state besides `self.state`; a counter often acts at every fifth.
_STEPS = 6


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else ""


def _refuse_host_reads(cls: type[torch.optim.Optimizer], run: Callable[..., Any]) -> None:
    """Take two steps on tensors without values, on which reading a value raises."""
    try:
        params, states, _ = run(_numbers("meta"))
        tensors = [{k: as_tensor(v, p) for k, v in s.items()} for s, p in zip(states, params)]
        for state in tensors:
            for name, value in state.items():
                if not isinstance(value, Tensor):
                    raise _impure(cls, f"its state entry {name!r} must be a tensor or a number; got {value!r}")
        _, later, _ = run(_numbers("meta"), tensors)
        for before, after in zip(tensors, later):
            if before.keys() != after.keys():
                raise _impure(
                    cls,
                    "its state must have the same entries after every step; got "
                    f"{sorted(before)} after the first and {sorted(after)} after the second",
                )
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AssertionError) as error:
        if str(error).startswith("stateless:"):
            raise
        raise _impure(
            cls,
            "its step fails on tensors without values, as it does if it reads one on the host "
            f"({type(error).__name__}: {_first_line(error)}); "
            "use it in an ordinary loop with funcamp.GradScaler",
        ) from error


def _observe(
    cls: type[torch.optim.Optimizer],
    arguments: dict[str, Any],
    dynamic: tuple[str, ...],
    branches: tuple[str, ...],
    untouched: dict[str, Any],
    run: Callable[..., Any],
) -> Traits:
    params, grads = _numbers("cpu")
    versions = [grad._version for grad in grads]
    fresh, fresh_states, instance = run((params, grads), writes_grads=False, wide=False)
    writes_grads = versions != [grad._version for grad in grads]
    for name, value in instance.param_groups[0].items():
        if name != "params" and name not in dynamic and not (name in untouched and untouched[name] == value):
            raise _impure(cls, f"its step changes {name!r} in its parameter group, which is not state; got {value!r}")
    _, recorded, _ = run((params, [torch.zeros_like(grad) for grad in grads]), wide=False)

    def reproduces(starts_at_zero: bool) -> bool:
        first = [first_values(state, param, starts_at_zero) for state, param in zip(recorded, params)]
        later, later_states, _ = run(_numbers("cpu"), first, wide=False)
        return all(torch.equal(a, b) for a, b in zip(fresh, later)) and all(
            torch.equal(as_tensor(a[name], value).to(value.dtype), value)
            for a, b in zip(fresh_states, later_states)
            for name, value in b.items()
        )

    as_recorded = reproduces(starts_at_zero=False)
    from_zero = not as_recorded and reproduces(starts_at_zero=True)
    differs = not (as_recorded or from_zero)
    entries = frozenset(name for state in recorded for name in state)
    return Traits(arguments, dynamic, writes_grads, from_zero, _is_elementwise(run), differs, entries, branches)


def _is_elementwise(run: Callable[..., Any]) -> bool:
    params, grads = (torch.cat([leaf.reshape(-1) for leaf in leaves]) for leaves in _numbers("cpu"))
    try:
        joined, (state,), _ = run(([params], [grads]))
    except (RuntimeError, ValueError, TypeError, AssertionError, IndexError):
        return False
    new, states, _ = run(_numbers("cpu"))
    if not torch.equal(joined[0], torch.cat([leaf.reshape(-1) for leaf in new])):
        return False
    if any(other.keys() != state.keys() for other in states):
        return False
    for name, value in state.items():
        parts = [as_tensor(other[name], params) for other in states]
        value = as_tensor(value, params)
        expected = parts[0] if value.dim() == 0 else torch.cat([part.reshape(-1) for part in parts])
        if value.shape not in ((), params.shape) or not torch.equal(value, expected):
            return False
    return True
