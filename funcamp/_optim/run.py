"""Run one step of a torch.optim class as a pure function, without reading a tensor on the host.

The class's own constructor and `step` run on clones, in an instance created for the call. Its hyperparameters are
numbers, or tensors that it takes for numbers (`Number`). The step reads tensors (`step.item()`) and passes tensors as
numbers (`alpha=-lr`); `_Pure` rewrites both, for the current thread only. No flag of torch is set.
"""

from __future__ import annotations

from collections import UserDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from funcamp import _upstream
from funcamp._optim.branchless import BRANCHLESS
from funcamp._optim.hyperparameters import map_items
from funcamp._optim.number import Comparisons, Number, has_number, numbers_to_tensors
from funcamp._optim.scalar_arguments import call_on_tensors, tensor_of
from funcamp._scaler.precision import widen
from funcamp._trace.as_compiled import as_eager
from funcamp._tree import settled

#: In-place calls of torch.optim without a batching rule; tests/upstream/test_upstream.py fails when one gets a rule.
_UNBATCHED = ("addcdiv_", "addcmul_", "clamp_", "lerp_")

#: With more tensors than _FEW_TENSORS, scalars are left to the compiler, because one buffer for each would be too many.
#: Except on a CPU with at least _MANY_ELEMENTS on average, where a power would be recomputed for every 16 of them.
_FEW_TENSORS = 16
_MANY_ELEMENTS = 1024

#: Devices on which torch.optim supports capturable=True and so keeps counters there. On others `_Pure` does.
_CAPTURABLE = ("cuda", "xpu", "hpu")

#: Operations whose scalar results are worth storing; none of them returns a view.
_ARITHMETIC = {
    "add", "sub", "mul", "div", "neg", "pow", "sqrt", "rsqrt", "norm", "clamp", "maximum", "minimum", "reciprocal",
    "__radd__", "__rsub__", "__rmul__", "__rdiv__", "__rtruediv__", "__rpow__",
}  # fmt: skip

_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"} | {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}

#: The state of one parameter, with torch.optim's names.
LeafState = dict[str, Tensor]


class _Pure(TorchFunctionMode):
    """Replaces torch.optim calls that are not pure or not traceable by equal ones.

    `item` returns a float64 tensor instead of a Python float: the same arithmetic, without a read. Numbers among a
    call's arguments may be tensors, which torch's kernels would read (`scalar_arguments`). An in-place call or one with
    out= that has no batching rule becomes its functional twin; otherwise vmap would loop or fail. With `settle`,
    scalars (bias corrections) are computed once instead of once per element of a parameter.
    """

    def __init__(self, settle: bool, has_numbers: bool, batched: list[Tensor]) -> None:
        super().__init__()
        self._settle = settle
        self._has_numbers = has_numbers
        self._batched = batched

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = self._run(func, args, dict(kwargs or {}))
        if not isinstance(result, Tensor):
            return result
        if self._batched and not any(isinstance(arg, Tensor) for arg in args):
            result = _batched_like(self._batched, result)  # a new counter
        if self._settle and getattr(func, "__name__", "") in _ARITHMETIC and result.dim() == 0:
            return settled(result)
        return result

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call of torch, from an equal call that reads nothing on the host."""
        name = getattr(func, "__name__", "")
        if name == "item":
            return widen(args[0]).clone()
        if self._has_numbers:
            if name in ("tensor", "as_tensor") and has_number(args[0]):
                return tensor_of(numbers_to_tensors(args[0]), **kwargs)
            if name in _COMPARISONS and args[0].is_floating_point() and isinstance(args[1], Number):
                # As torch rounds a Python number. Under vmap, and for two tensors of shape (), it would compare in
                # float64: Rprop finds no element that it has set to etaminus.
                args = (args[0], args[1].tensor.to(args[0].dtype))
            args = numbers_to_tensors(args)
            kwargs = numbers_to_tensors(kwargs)
        call = call_on_tensors(name, args, kwargs)
        if call is not None:
            return call()
        return _with_batching_rule(func, name, args, kwargs)


def _with_batching_rule(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of a call of torch; of its functional twin, if it writes and has no batching rule."""
    if name == "__setitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
        target, mask, value = args  # in Rprop, with a mask of the same shape
        return target.copy_(torch.where(mask, value, target))
    if name in _UNBATCHED and _upstream.is_batched(args[0]):
        functional = getattr(torch.Tensor, name.removesuffix("_"))
        return args[0].copy_(functional(*args, **kwargs))
    out = kwargs.get("out")
    if isinstance(out, Tensor) and _upstream.is_batched(out):
        del kwargs["out"]
        return out.copy_(func(*args, **kwargs))
    return func(*args, **kwargs)


class RecordingState(UserDict[str, Any]):
    """A parameter's state that remembers the first value of each key: the state before the first step.

    A `UserDict`, because a dict's own `setdefault` and `update` pass `__setitem__` by.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first_values: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first_values:
            # A clone, because the step goes on to write into the tensor.
            self.first_values[key] = value.clone() if isinstance(value, Tensor) else value
        super().__setitem__(key, value)


def number_as_tensor(value: Any, like: Tensor) -> Any:
    """Return a number, in Python or in a tensor, as a tensor of shape () on its parameter's device.

    Other entries of a state are returned as they are.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return torch.full((), value, dtype=torch.int64, device=like.device)
    if isinstance(value, float):
        return torch.full((), value, dtype=torch.float32, device=like.device)
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.to(like.device)
    return value


def _widened_counter(name: str, value: Tensor) -> Tensor:
    """Return a step counter in float64 on a CPU, any other entry of a state as it is.

    torch.optim takes powers of the step in Python floats, with capturable=True in float32.
    """
    # Not done in `item`, because torch.optim does not call it under torch.compile.
    if name == "step" and value.device.type == "cpu" and value.is_floating_point():
        return value.double()
    return value


def with_former_entries(before: LeafState, after: Mapping[str, Any], like: Tensor) -> LeafState:
    """Return the state after a step, in the dtypes before it.

    Raises:
        ValueError: the step made entries that the given state lacks: it is another optimizer's.
    """
    if before.keys() != after.keys():
        raise ValueError(
            f"update: opt_state must hold the entries that this optimizer keeps, {sorted(after)}; got {sorted(before)}"
        )
    narrowed = {}
    for name, value in before.items():
        new_value = number_as_tensor(after[name], like)
        narrowed[name] = new_value.to(value.dtype) if name == "step" else new_value
    return narrowed


def refuse_differentiation(tensors: Iterable[Tensor]) -> None:
    """Raise ValueError if torch.func differentiates a tensor: the gradient would silently be zero."""
    for tensor in tensors:
        inner = tensor
        while _upstream.is_wrapped(inner):
            if _upstream.is_differentiated(inner):
                raise ValueError(
                    "update: params and grads must not be differentiated, as no gradient flows through a torch.optim "
                    f"step; detach them, or write the inner update by hand; got {type(tensor).__name__} under "
                    "torch.func.grad, vjp or jacrev"
                )
            inner = _upstream.unwrapped(inner)


def state_before_first_step(recorded: Mapping[str, Any], like: Tensor, starts_at_zero: bool) -> LeafState:
    """Return the state before the first step.

    Args:
        recorded: the first values of a step with a zero gradient.
        like: the parameter.
        starts_at_zero: whether these are only examples of the tensors: the state starts at zero (`Traits`).
    """
    tensors = {name: number_as_tensor(value, like) for name, value in recorded.items()}
    if starts_at_zero:
        return {name: torch.zeros_like(value) for name, value in tensors.items()}
    return tensors


def _settles_scalars(params: list[Tensor]) -> bool:
    """Return whether scalars are computed once, each in a buffer, instead of where they are used."""
    if len(params) <= _FEW_TENSORS:
        return True
    element_count = sum(param.numel() for param in params)
    return params[0].device.type == "cpu" and element_count >= _MANY_ELEMENTS * len(params)


def _numbers(
    arguments: dict[str, Any], hyper: dict[str, Any], comparisons: Comparisons
) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the hyperparameters as the class gets them, and those of their tensors that vmap batches."""
    batched: list[Tensor] = []

    def number(label: str, value: object, example: float) -> object:
        if not isinstance(value, Tensor):
            return value
        if _upstream.is_batched(value):
            batched.append(value)
        return Number(label, example, value, comparisons)

    numbers = {name: map_items(number, name, value, arguments[name]) for name, value in hyper.items()}
    return numbers, batched


def _batched_like(batched: list[Tensor], value: Tensor) -> Tensor:
    """Batch a value over the dimensions of these tensors, because vmap writes in place only into batched tensors."""
    for tensor in batched:
        value = torch.where(torch.ones_like(tensor, dtype=torch.bool), value, value)
    return value


class StepRun(NamedTuple):
    """The results of one run of a class's step."""

    params: list[Tensor]
    """The new parameters."""
    states: list[Mapping[str, Any]]
    """For each parameter its state after the step: tensors, or Python numbers for counters."""
    first_values: list[dict[str, Any]]
    """For each parameter the first value of each entry of its state; none for a state that was given."""
    instance: torch.optim.Optimizer
    """The instance that took the step."""


def run_step(
    cls: type[torch.optim.Optimizer],
    arguments: dict[str, Any],
    hyper: dict[str, Any],
    params: list[Tensor],
    grads: list[Tensor],
    states: list[LeafState] | None,
    *,
    writes_grads: bool = True,
    wide: bool = True,
    comparisons: Comparisons | None = None,
) -> StepRun:
    """Take one step of `cls(params, **arguments | hyper)` from the given states.

    Args:
        cls: the optimizer's class.
        arguments: Python values for its constructor; examples if a hyperparameter is a tensor.
        hyper: the hyperparameters that are tensors of shape (), or tuples with such tensors.
        params: parameters, at least one.
        grads: their gradients, of the same shapes; cast to the parameter's dtype.
        states: their states; None to start without a state and record the first value of each entry.
        writes_grads: whether the class writes into gradients, which are then cloned.
        wide: whether to use float64 step counters inside, on a CPU.
        comparisons: what comparisons of its hyperparameters answer, and a record of those with 0.
    """
    comparisons = comparisons or Comparisons(cls.__name__)
    numbers, batched = _numbers(arguments, hyper, comparisons)
    with torch.no_grad():
        new_params = _clones_with_grads(params, grads, batched, clone_grads=writes_grads)
        if "capturable" in arguments:
            arguments = arguments | {"capturable": new_params[0].device.type in _CAPTURABLE}
        if not arguments.get("capturable"):
            cls = BRANCHLESS.get(cls, cls)
        pure = _Pure(settle=_settles_scalars(new_params), has_numbers=bool(numbers), batched=batched)
        with pure, as_eager():
            optimizer = cls(new_params, **arguments | numbers)
        comparisons.is_constructing = False
        if states is None:
            _record_states(optimizer, new_params)
        else:
            _set_states(optimizer, new_params, states, batched, wide=wide)
        # Its errors and warnings are for a user's own instance on a GPU; this instance lives for one step.
        optimizer._accelerator_graph_capture_health_check = lambda: None  # type: ignore[method-assign]
        step = cls.step
        if getattr(step, "hooked", False):  # skip torch's wrapper for hooks and the profiler
            step = step.__wrapped__  # type: ignore[attr-defined]
        with pure, as_eager():
            step(optimizer)
    for param in new_params:
        param.grad = None
    new_states = [optimizer.state[param] for param in new_params]
    first_values = [state.first_values if isinstance(state, RecordingState) else {} for state in new_states]
    return StepRun(new_params, new_states, first_values, optimizer)


def _clones_with_grads(
    params: list[Tensor], grads: list[Tensor], batched: list[Tensor], *, clone_grads: bool
) -> list[Tensor]:
    """Return clones of parameters, with the gradients in `grad`; without clone_grads these may be the caller's."""
    clones = [_batched_like(batched, param.detach().clone()) for param in params]
    for param, grad in zip(clones, grads):
        grad = _batched_like(batched, grad.detach().to(param.dtype))
        param.grad = grad.clone() if clone_grads else grad
    return clones


def _record_states(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> None:
    """Make an instance record the first value of each entry of its states."""
    constructed_states = optimizer.state  # torch 2.11's Adagrad fills it in its constructor
    optimizer.state = defaultdict(RecordingState)
    for param in params:
        optimizer.state[param].update(constructed_states.get(param, {}))


def _set_states(
    optimizer: torch.optim.Optimizer,
    params: list[Tensor],
    states: list[LeafState],
    batched: list[Tensor],
    *,
    wide: bool,
) -> None:
    """Give an instance clones of the states; one without entries is as before the first step."""
    optimizer.state = defaultdict(RecordingState)
    for param, state in zip(params, states):
        if not state:
            continue
        clones: dict[str, Any] = {}
        for name, value in state.items():
            clones[name] = _batched_like(batched, value.clone()) if isinstance(value, Tensor) else value
        if wide:
            clones = {name: _widened_counter(name, value) for name, value in clones.items()}
        optimizer.state[param] = clones
