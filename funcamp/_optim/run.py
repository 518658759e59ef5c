"""Run one step of a torch.optim class as a pure function, without reading a tensor on the host.

The class's own constructor and `step` run on clones, in an instance created for the call. Its hyperparameters are
numbers, or tensors that it takes for numbers (`Number`). The step reads tensors (`step.item()`) and passes tensors as
numbers (`alpha=-lr`); `_Pure` rewrites both, for the current thread only. No flag of torch is set.
"""

from __future__ import annotations

from collections import UserDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from funcamp import _upstream
from funcamp._optim.branchless import BRANCHLESS
from funcamp._optim.hyperparameters import map_items
from funcamp._optim.number import Number, Use, as_tensors, has_number
from funcamp._optim.scalar_arguments import formula, tensor_of
from funcamp._scaler.precision import widen
from funcamp._trace.as_compiled import as_eager
from funcamp._tree import settled

#: In-place calls of torch.optim without a batching rule; tests/upstream/test_upstream.py fails when one gets a rule.
_UNBATCHED = ("addcdiv_", "addcmul_", "clamp_", "lerp_")

#: With more tensors than _FEW, scalars are left to the compiler, because one buffer for each would be too many. Except
#: on a CPU with at least _LARGE elements on average, where a power would be recomputed for every 16 of them.
_FEW, _LARGE = 16, 1024

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
        out = self._run(func, args, dict(kwargs or {}))
        if self._batched and isinstance(out, Tensor) and not any(isinstance(arg, Tensor) for arg in args):
            out = _batched_like(self._batched, out)  # a new counter
        if self._settle and getattr(func, "__name__", "") in _ARITHMETIC and isinstance(out, Tensor) and out.dim() == 0:
            return settled(out)
        return out

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name == "item":
            return widen(args[0]).clone()
        if self._has_numbers:
            if name in ("tensor", "as_tensor") and has_number(args[0]):
                return tensor_of(as_tensors(args[0]), **kwargs)
            if name in _COMPARISONS and args[0].is_floating_point() and isinstance(args[1], Number):
                # As torch rounds a Python number. Under vmap, and for two tensors of shape (), it would compare in
                # float64: Rprop finds no element that it has set to etaminus.
                args = (args[0], args[1].tensor.to(args[0].dtype))
            args, kwargs = as_tensors(args), as_tensors(kwargs)
        on_tensors = formula(name, args, kwargs)
        if on_tensors is not None:
            return on_tensors()
        if name == "__setitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            target, chosen, value = args  # in Rprop, with a mask of the same shape
            return target.copy_(torch.where(chosen, value, target))
        if name in _UNBATCHED and _upstream.is_batched(args[0]):
            return args[0].copy_(getattr(torch.Tensor, name[:-1])(*args, **kwargs))
        if isinstance(kwargs.get("out"), Tensor) and _upstream.is_batched(kwargs["out"]):
            return kwargs.pop("out").copy_(func(*args, **kwargs))
        return func(*args, **kwargs)


class Recorder(UserDict[str, Any]):
    """A parameter's state that remembers the first value of each key: the state before the first step.

    A `UserDict`, because a dict's own `setdefault` and `update` pass `__setitem__` by.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = value.clone() if isinstance(value, Tensor) else value
        super().__setitem__(key, value)


def as_tensor(value: Any, like: Tensor) -> Any:
    """Return a counter as a tensor of shape () on its parameter's device, not a constant of the graph."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return torch.full((), value, dtype=torch.int64 if isinstance(value, int) else torch.float32, device=like.device)
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.to(like.device)
    return value


def _counter(name: str, value: Tensor) -> Tensor:
    # torch.optim takes powers of the step in Python floats, with capturable=True in float32. Not done in `item`,
    # because torch.optim does not call it under torch.compile.
    return value.double() if name == "step" and value.device.type == "cpu" and value.is_floating_point() else value


def narrow_counters(before: LeafState, after: dict[str, Any], like: Tensor) -> LeafState:
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
        new = as_tensor(after[name], like)
        narrowed[name] = new.to(value.dtype) if name == "step" else new
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


def first_values(recorded: Any, like: Tensor, starts_at_zero: bool) -> LeafState:
    """Return the state before the first step, as a `Recorder` saw it in a step with a zero gradient."""
    first = {name: as_tensor(value, like) for name, value in recorded.first.items()}
    return {name: torch.zeros_like(value) for name, value in first.items()} if starts_at_zero else first


def _settles(params: list[Tensor]) -> bool:
    large = sum(param.numel() for param in params) >= _LARGE * len(params)
    return len(params) <= _FEW or (large and params[0].device.type == "cpu")


def _numbers(arguments: dict[str, Any], hyper: dict[str, Any], use: Use) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the hyperparameters as the class gets them, and those of their tensors that vmap batches."""
    batched: list[Tensor] = []

    def number(label: str, value: Any, example: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if _upstream.is_batched(value):
            batched.append(value)
        return Number(label, example, value, use)

    return {name: map_items(number, name, value, arguments[name]) for name, value in hyper.items()}, batched


def _batched_like(batched: list[Tensor], value: Tensor) -> Tensor:
    """Batch a value over the dimensions of these tensors, because vmap writes in place only into batched tensors."""
    for tensor in batched:
        value = torch.where(torch.ones_like(tensor, dtype=torch.bool), value, value)
    return value


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
    use: Use | None = None,
) -> tuple[list[Tensor], list[dict[str, Any]], torch.optim.Optimizer]:
    """Take one step of `cls(params, **arguments | hyper)` from the given states.

    Args:
        cls: the optimizer's class.
        arguments: Python values for its constructor; examples if a hyperparameter is a tensor.
        hyper: the hyperparameters that are tensors of shape (), or tuples with such tensors.
        params: parameters, at least one.
        grads: their gradients, of the same shapes; cast to the parameter's dtype.
        states: their states; None to start without a state and record the first value of each entry (`Recorder`).
        writes_grads: whether the class writes into gradients, which are then cloned.
        wide: whether to use float64 step counters inside, on a CPU.
        use: what the step may ask of its hyperparameters, and a record of what it asked.

    Returns:
        New parameters, new states (`Recorder`s if states is None), and the instance that ran.
    """
    use = use or Use(cls.__name__)
    numbers, batched = _numbers(arguments, hyper, use)
    with torch.no_grad():
        fresh = [_batched_like(batched, param.detach().clone()) for param in params]
        for param, grad in zip(fresh, grads):
            grad = _batched_like(batched, grad.detach().to(param.dtype))
            param.grad = grad.clone() if writes_grads else grad
        if "capturable" in arguments:
            arguments = arguments | {"capturable": fresh[0].device.type in _CAPTURABLE}
        if not arguments.get("capturable"):
            cls = BRANCHLESS.get(cls, cls)
        pure = _Pure(settle=_settles(fresh), has_numbers=bool(numbers), batched=batched)
        with pure, as_eager():
            optimizer = cls(fresh, **arguments | numbers)
        use.constructing = False
        made = optimizer.state  # torch 2.11's Adagrad fills it in its constructor
        optimizer.state = defaultdict(Recorder)
        for index, param in enumerate(fresh):
            if states is None:
                optimizer.state[param].update(made.get(param, {}))
            elif states[index]:
                given = states[index].items()
                copies = {name: _batched_like(batched, value.clone()) for name, value in given}
                if wide:
                    copies = {name: _counter(name, value) for name, value in copies.items()}
                optimizer.state[param] = copies
        # Its errors and warnings are for a user's own instance on a GPU; this instance lives for one step.
        optimizer._accelerator_graph_capture_health_check = lambda: None  # type: ignore[method-assign]
        step = cls.step
        if getattr(step, "hooked", False):  # skip torch's wrapper for hooks and the profiler
            step = step.__wrapped__  # type: ignore[attr-defined]
        with pure, as_eager():
            step(optimizer)
    for param in fresh:
        param.grad = None
    return fresh, [optimizer.state[param] for param in fresh], optimizer
