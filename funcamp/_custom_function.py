"""`custom_function`: an autograd.Function that keeps its backward, and its autocast, under every transform."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor
from torch.autograd import Function

from funcamp import _tree

F = TypeVar("F", bound=type[Function])


class _Place(NamedTuple):
    """Where a tensor that forward saved is found again: among its inputs, or among its outputs."""

    of_inputs: bool
    at: int


class _Call:
    """One call of a Function: what its forward leaves to setup_context and backward beside tensors."""

    def __init__(self, region: tuple[str, torch.dtype, bool] | None) -> None:
        self.region = region
        """The autocast that forward sees: type of device, dtype, whether it is on."""
        self.outputs: int | None = None
        """How many of the outputs are forward's own; None for all."""
        self.single = False
        self.done: dict[str, tuple[Any, ...]] = {}
        """The calls of ctx's methods in forward, a `_Place` for each tensor."""
        self.attributes: dict[str, Any] = {}
        """What forward put on ctx, likewise."""

    def autocast(self) -> Any:
        if self.region is None:
            return contextlib.nullcontext()
        kind, dtype, enabled = self.region
        return torch.autocast(kind, dtype, enabled=enabled)


class _Notes:
    """Stands for ctx in a forward that takes one."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple(isinstance(arg, Tensor) and arg.dtype.is_floating_point for arg in args)
        self._done: dict[str, tuple[Any, ...]] = {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in ("save_for_backward", "mark_dirty", "mark_non_differentiable", "set_materialize_grads"):
            raise AttributeError(f"custom_function: ctx has no {name!r} in a forward that runs under torch.func")
        return lambda *args: self._done.__setitem__(name, args)


def _forward_with_notes(cls: type[Function], args: tuple[Any, ...], call: _Call) -> tuple[Any, ...]:
    """What a forward that takes ctx returns, and after it the intermediates that it saved."""
    notes = _Notes(args)
    result = cls.forward(notes, *args)
    call.single = not isinstance(result, tuple)
    outputs = [result] if call.single else list(result)
    call.outputs = len(outputs)

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        for of_inputs, among in ((True, list(args)), (False, outputs)):
            for index, known in enumerate(among):
                if known is value:
                    return _Place(of_inputs, index)
        outputs.append(value)
        return _Place(False, len(outputs) - 1)

    call.done = {name: tuple(place(value) for value in given) for name, given in notes._done.items()}
    call.attributes = {
        name: place(value) for name, value in vars(notes).items() if name not in ("needs_input_grad", "_done")
    }
    return tuple(outputs)


def _set_up_from_notes(ctx: Any, call: _Call, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
    def find(value: Any) -> Any:
        if not isinstance(value, _Place):
            return value
        return (inputs if value.of_inputs else outputs)[value.at]

    done = {name: tuple(find(value) for value in given) for name, given in call.done.items()}
    intermediates = outputs[call.outputs :]
    if intermediates:
        done["mark_non_differentiable"] = (*done.get("mark_non_differentiable", ()), *intermediates)
    for name, given in done.items():
        getattr(ctx, name)(*given)
    for name, value in call.attributes.items():
        setattr(ctx, name, find(value))


def _make(cls: type[Function], cast_inputs: torch.dtype | None) -> type[Function]:
    takes_ctx = cls.setup_context is Function.setup_context
    own: Any = cls
    backward_of = cls.backward if cls.vjp is Function.vjp else cls.vjp
    signature = inspect.signature(cls.forward)

    def apply(_: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*((None,) if takes_ctx else ()), *args, **kwargs)
        bound.apply_defaults()
        if bound.kwargs:
            raise TypeError(f"{cls.__name__}.apply: forward must not have keyword-only arguments; got {bound.kwargs}")
        values, region = _cast(bound.args[1:] if takes_ctx else bound.args, cast_inputs)
        call = _Call(region)
        with call.autocast():
            out = inner.apply(*values, call)
        if call.outputs is None:
            return out
        return out[0] if call.single else out[: call.outputs]

    def forward(*args: Any) -> Any:
        *values, call = args
        return _forward_with_notes(cls, tuple(values), call) if takes_ctx else cls.forward(*values)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *values, call = inputs
        if takes_ctx:
            _set_up_from_notes(ctx, call, tuple(values), output)
        else:
            cls.setup_context(ctx, tuple(values), output)
        ctx.funcamp_call = call

    def backward(ctx: Any, *grads: Any) -> Any:
        call = ctx.funcamp_call
        with call.autocast():
            result = backward_of(ctx, *grads[: call.outputs])
        return (*(result if isinstance(result, tuple) else (result,)), None)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        with ctx.funcamp_call.autocast():
            return own.jvp(ctx, *tangents[:-1])

    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return own.vmap(info, in_dims[:-1], *args[:-1])

    body: dict[str, Any] = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "forward": staticmethod(forward),
        "setup_context": staticmethod(setup_context),
        "backward": staticmethod(backward),
        "vjp": staticmethod(Function.vjp),
        "generate_vmap_rule": cls.vmap is Function.vmap,
    }
    if cls.vmap is not Function.vmap:
        body["vmap"] = staticmethod(vmap)
    if cls.jvp is not Function.jvp:
        body["jvp"] = staticmethod(jvp)
    # Two classes: torch.func calls apply again at every level it goes down, and each call is to add its `_Call` once.
    inner: Any = type(cls.__name__, (cls,), body)
    return type(cls.__name__, (inner,), {**body, "apply": classmethod(apply)})


def _cast(args: tuple[Any, ...], cast_inputs: torch.dtype | None) -> tuple[Any, tuple[str, torch.dtype, bool] | None]:
    """The arguments for forward, and the autocast that it sees."""
    leaves, spec = _tree.flatten(args)
    kind = next((leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "meta")
    if not torch.amp.is_autocast_available(kind):
        return args, None
    region = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
    if cast_inputs is None or not region[2]:
        return args, region
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64:
            leaves[index] = leaf.to(cast_inputs) if leaf.device.type == kind else leaf
    return _tree.unflatten(leaves, spec), (*region[:2], False)


@overload
def custom_function(cls: F, *, cast_inputs: torch.dtype | None = None) -> F: ...
@overload
def custom_function(cls: None = None, *, cast_inputs: torch.dtype | None = None) -> Callable[[F], F]: ...
def custom_function(cls: Any = None, *, cast_inputs: torch.dtype | None = None) -> Any:
    """Make an autograd.Function right under autocast, torch.func and torch.compile, all at once.

    Decorates a class with `forward(ctx, ...)` or with `forward(...)` and `setup_context`. What torch.amp.custom_fwd and
    custom_bwd do happens in both styles: backward runs under the autocast that forward saw, and cast_inputs applies
    under autocast. A forward that takes ctx runs under torch.func too: what it saves is kept as further outputs, to
    which a second derivative is blind, as it is to intermediates in torch. vmap works without a rule of its own.
    torch.compile puts the Function into its graph whole, so that its backward cannot be lost; what forward reads
    besides its arguments is then a constant of the program. Pure if forward is; no sync.

    Args:
        cls: the class; torch.amp.custom_fwd and custom_bwd may be on its methods already. A Function of somebody
            else's can be given: `Theirs = custom_function(Theirs)`.
        cast_inputs: under autocast, cast the floating-point inputs (float64 apart) to this dtype and run forward and
            backward without autocast; None leaves both as they are.

    Returns:
        A subclass of cls, of its name; call its `apply`.

    Raises:
        TypeError: cls is no subclass of autograd.Function, or cast_inputs no floating-point dtype; from apply: forward
            has keyword-only arguments.

    Example:
        >>> @custom_function(cast_inputs=torch.float32)
        ... class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x * x
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return 2 * ctx.saved_tensors[0] * grad
        >>> torch.func.vmap(torch.func.grad(Square.apply))(torch.tensor([1.0, 2.0]))
        tensor([2., 4.])

    References:
        torch/amp/autocast_mode.py (custom_fwd, custom_bwd) and torch/_functorch/autograd_function.py, PyTorch 2.13.
    """
    call = "custom_function"
    if cast_inputs is not None and not (isinstance(cast_inputs, torch.dtype) and cast_inputs.is_floating_point):
        raise TypeError(f"{call}: cast_inputs must be a floating-point dtype or None; got {cast_inputs!r}")
    if cls is None:
        return lambda given: custom_function(given, cast_inputs=cast_inputs)
    if not (isinstance(cls, type) and issubclass(cls, Function)):
        raise TypeError(f"{call}: cls must be a subclass of torch.autograd.Function; got {cls!r}")
    made = _make(cls, cast_inputs)
    torch.compiler.allow_in_graph(made)  # type: ignore[no-untyped-call]
    return made
