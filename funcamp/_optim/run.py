"""Run one step of a torch.optim class on values: nothing the caller holds is written, nothing is read on the host.

The class's own `step` runs, on clones, in an instance built for the purpose. It reads tensors (`step.item()`) and takes
tensors for numbers (`alpha=-lr`); `_Pure` rewrites both. The rewriting is local to the thread: no flag of torch is set.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from funcamp import _upstream
from funcamp._optim.branchless import ASGD, RAdam
from funcamp._scaler.torch_rule import widen
from funcamp._tree import settled

#: In-place calls of torch.optim without a batching rule; tests/upstream/test_upstream.py tells when one can go.
_UNBATCHED = ("addcdiv_", "addcmul_", "clamp_", "lerp_")

#: A run of more tensors than this leaves scalars to the compiler, for one buffer for each would be too many; unless
#: they have so many elements on average, on a CPU, where a power is computed anew for every 16 of them.
_FEW, _LARGE = 16, 1024

#: Where torch.optim takes capturable=True, and so keeps its counters on the device. Elsewhere `_Pure` keeps them there.
_CAPTURABLE = ("cuda", "xpu", "hpu")

#: Classes that elsewhere branch on a counter.
_WITHOUT_BRANCH: dict[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {
    torch.optim.ASGD: ASGD,
    torch.optim.RAdam: RAdam,
}

#: What makes a scalar worth computing once; none of these returns a view.
_ARITHMETIC = {
    "add", "sub", "mul", "div", "neg", "pow", "sqrt", "rsqrt", "norm", "clamp", "maximum", "minimum", "reciprocal",
    "__radd__", "__rsub__", "__rmul__", "__rdiv__", "__rtruediv__", "__rpow__",
}  # fmt: skip

#: State of one parameter under torch.optim's own names.
LeafState = dict[str, Tensor]


class _Pure(TorchFunctionMode):
    """Runs the calls of torch.optim that are in the way of purity in an equal form.

    `item` returns a float64 tensor instead of a Python float: the same arithmetic, without a read. Where alpha, value
    or fill_value is a tensor: torch's kernels take a number there, and would read the tensor. Where an in-place call,
    or one with out=, has no batching rule but its functional twin has: vmap would loop or refuse. With `settle`,
    scalars (bias corrections) are computed once and not for every element of a parameter.
    """

    def __init__(self, settle: bool) -> None:
        super().__init__()
        self._settle = settle

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = self._run(func, args, dict(kwargs or {}))
        if self._settle and getattr(func, "__name__", "") in _ARITHMETIC and isinstance(out, Tensor) and out.dim() == 0:
            return settled(out)
        return out

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name == "item":
            return widen(args[0]).clone()
        if isinstance(kwargs.get("alpha"), Tensor) and name in ("add", "add_", "sub", "sub_"):
            alpha, other = kwargs.pop("alpha"), args[1]
            if isinstance(other, Tensor):  # the kernel multiplies after promotion: Muon adds bfloat16 to float32
                other = other.to(torch.result_type(args[0], other))
            return func(args[0], other * alpha, **kwargs)
        if isinstance(kwargs.get("value"), Tensor) and name in ("addcdiv", "addcdiv_", "addcmul", "addcmul_"):
            value, (base, left, right) = kwargs.pop("value"), args
            term = left * value / right if name.startswith("addcdiv") else left * value * right
            return base.add_(term) if name.endswith("_") else torch.add(base, term, **kwargs)
        if name == "full_like" and len(args) == 2 and isinstance(args[1], Tensor):
            return torch.zeros_like(args[0], **kwargs) + args[1].to(args[0].dtype)
        if name == "__setitem__" and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            target, chosen, value = args  # Rprop's, by a mask of the same shape
            return target.copy_(torch.where(chosen, value, target))
        if name in _UNBATCHED and _upstream.is_batched(args[0]):
            return args[0].copy_(getattr(torch.Tensor, name[:-1])(*args, **kwargs))
        if isinstance(kwargs.get("out"), Tensor) and _upstream.is_batched(kwargs["out"]):
            return kwargs.pop("out").copy_(func(*args, **kwargs))
        return func(*args, **kwargs)


class Recorder(dict[str, Any]):
    """The state of one parameter that remembers the first value each key was given: the state before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = value.clone() if isinstance(value, Tensor) else value
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """As dict's, through `__setitem__`."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """As dict's, through `__setitem__`."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


def as_tensor(value: Any, like: Tensor) -> Any:
    """A counter as a tensor of shape () beside its parameter: neither a constant of a graph nor on the host."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return torch.full((), value, dtype=torch.int64 if isinstance(value, int) else torch.float32, device=like.device)
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.to(like.device)
    return value


def _counter(name: str, value: Tensor) -> Tensor:
    # torch.optim takes powers of the step in Python floats, by capturable=True in float32. Not left to `item`: while
    # torch.compile is at work torch.optim does not call it.
    return value.double() if name == "step" and value.device.type == "cpu" and value.is_floating_point() else value


def narrow_counters(before: LeafState, after: dict[str, Any], like: Tensor) -> LeafState:
    """The entries of a state after a step, in the dtypes that they had before it.

    Raises:
        ValueError: the step made entries that the state given lacks: it is another optimizer's.
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
    """Raise ValueError where a tensor is being differentiated by torch.func: the gradient would silently be zero."""
    for tensor in tensors:
        inner = tensor
        while _upstream.is_wrapped(inner):
            if _upstream.is_differentiated(inner):
                raise ValueError(
                    "update: params and grads must not be differentiated, for no gradient flows through a torch.optim "
                    f"step; detach them, or write the inner update by hand; got {type(tensor).__name__} under "
                    "torch.func.grad, vjp or jacrev"
                )
            inner = _upstream.unwrapped(inner)


def first_values(recorded: Any, like: Tensor, starts_at_zero: bool) -> LeafState:
    """The state before the first step, from what a `Recorder` saw in a step on a zero gradient."""
    first = {name: as_tensor(value, like) for name, value in recorded.first.items()}
    return {name: torch.zeros_like(value) for name, value in first.items()} if starts_at_zero else first


def _settles(params: list[Tensor]) -> bool:
    large = sum(param.numel() for param in params) >= _LARGE * len(params)
    return len(params) <= _FEW or (large and params[0].device.type == "cpu")


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
) -> tuple[list[Tensor], list[dict[str, Any]], torch.optim.Optimizer]:
    """One step of `cls(params, **arguments)`, its group updated with `hyper`, from the states given.

    Args:
        cls: the optimizer's class.
        arguments: Python values for its constructor.
        hyper: what replaces entries of its parameter group: tensors, or numbers a schedule returned.
        params: parameters, one or more.
        grads: their gradients, same shapes; cast to the parameter's dtype.
        states: their states; None to start from nothing and record the first value of each entry (`Recorder`).
        writes_grads: whether the class writes into gradients, which are then cloned.
        wide: whether the step counters given are float64 inside, on a CPU.

    Returns:
        New parameters, new states (`Recorder`s where states is None), and the instance that ran.
    """
    with torch.no_grad():
        fresh = [param.detach().clone() for param in params]
        for param, grad in zip(fresh, grads):
            grad = grad.detach().to(param.dtype)
            param.grad = grad.clone() if writes_grads else grad
        capturable = fresh[0].device.type in _CAPTURABLE
        if not capturable:
            cls = _WITHOUT_BRANCH.get(cls, cls)
        optimizer = cls(fresh, **(arguments | {"capturable": capturable} if "capturable" in arguments else arguments))
        optimizer.param_groups[0].update(hyper)
        made = optimizer.state  # torch 2.11's Adagrad fills it in its constructor
        optimizer.state = defaultdict(Recorder)
        for index, param in enumerate(fresh):
            if states is None:
                optimizer.state[param].update(made.get(param, {}))
            elif states[index]:
                given = states[index].items()
                optimizer.state[param] = {
                    name: _counter(name, value.clone()) if wide else value.clone() for name, value in given
                }
        # Its error and its warning are about a user's own instance, on a device; this one lives for a step.
        optimizer._accelerator_graph_capture_health_check = lambda: None  # type: ignore[method-assign]
        step = cls.step
        if getattr(step, "hooked", False):  # torch's wrapper for hooks and the profiler: neither has a place here
            step = step.__wrapped__  # type: ignore[attr-defined]
        with _Pure(settle=_settles(fresh)):
            step(optimizer)
    for param in fresh:
        param.grad = None
    return fresh, [optimizer.state[param] for param in fresh], optimizer
