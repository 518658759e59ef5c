"""How an optimizer class stores its state, found by running it on a few numbers."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcamp import _upstream
from funcamp._optim.hyperparameters import is_dynamic, placeholder, stand_in
from funcamp._optim.run import as_tensor, first_values, run_step


@dataclass(frozen=True)
class Traits:
    """How a class stores its state and runs."""

    arguments: dict[str, Any]
    """Python values for its constructor; a placeholder if the hyperparameter is a tensor or a schedule."""
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


def probe(cls: type[torch.optim.Optimizer], hyperparameters: dict[str, Any]) -> Traits:
    """Find a class's traits, or raise with the reason why it cannot be used.

    Raises:
        TypeError: as in `stateless`.
        ValueError: as in `stateless`.
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(f"stateless: optimizer must be a subclass of torch.optim.Optimizer; got {cls!r}")
    accepted = inspect.signature(cls.__init__).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    for name, value in hyperparameters.items():
        if name in ("self", "params") or not (open_ended or name in accepted):
            raise TypeError(f"stateless: {cls.__name__} has no hyperparameter {name}; got {name}={value!r}")
    for name in ("fused", "foreach", "differentiable"):
        if hyperparameters.get(name):
            raise ValueError(
                f"stateless: {name} must be False or None (torch.compile fuses the step; no gradient flows through it);"
                f" got {name}={hyperparameters[name]!r}"
            )
    required = [p.name for p in list(inspect.signature(cls.step).parameters.values())[1:] if p.default is p.empty]
    if required:
        raise _impure(
            cls,
            f"its step needs {', '.join(required)}, through which it evaluates the loss and branches on the value on "
            "the host; use it in an ordinary float32 loop, without a scaler, or take an optimizer without a closure",
        )
    dynamic = tuple(name for name, value in hyperparameters.items() if is_dynamic(value))
    arguments = {name: placeholder(value, name, accepted) for name, value in hyperparameters.items()}
    for name, value in (("capturable", False), ("foreach", False), ("fused", None)):
        if name in accepted:
            arguments.setdefault(name, value)

    def run(numbers: _Numbers, states: Any = None, **options: Any) -> Any:
        params, grads = numbers
        device = params[0].device.type
        hyper = {name: stand_in(hyperparameters[name], arguments[name], device) for name in dynamic}
        return run_step(cls, arguments, hyper, params, grads, states, **options)

    # Independent of the caller's modes and defaults, because this must run on real numbers.
    without_modes = _upstream.find("torch.utils._python_dispatch._disable_current_modes", contextlib.nullcontext)
    with without_modes(), torch.device("cpu"), torch.inference_mode(mode=False):
        try:
            untouched = cls([torch.zeros(2, 2)], **arguments).param_groups[0]
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"stateless: {cls.__name__} refuses its hyperparameters: {error}") from error
        _refuse_host_reads(cls, run)
        return _observe(cls, arguments, dynamic, untouched, run)


#: Parameters, and their gradients.
_Numbers = tuple[list[Tensor], list[Tensor]]


def _impure(cls: type, why: str) -> TypeError:
    return TypeError(f"stateless: {cls.__name__} cannot be made pure: {why}")


def _numbers(device: str) -> _Numbers:
    base = torch.linspace(-1.0, 1.5, 6, device=device)
    return [base.reshape(2, 3), base.reshape(3, 2).cos()], [base.reshape(2, 3).sin(), base.reshape(3, 2).exp()]


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
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}); "
            "use it in an ordinary loop with funcamp.GradScaler",
        ) from error


def _observe(
    cls: type[torch.optim.Optimizer],
    arguments: dict[str, Any],
    dynamic: tuple[str, ...],
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
    return Traits(arguments, dynamic, writes_grads, from_zero, _is_elementwise(run), differs, entries)


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
