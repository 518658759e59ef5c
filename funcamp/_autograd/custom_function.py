"""`custom_function`: make an autograd.Function keep its backward and autocast under all transforms."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch import Tensor
from torch.autograd import Function

from funcamp import _tree, _upstream

F = TypeVar("F", bound=type[Function])
_CAST = "_funcamp_cast_inputs"
_KINDS = "_funcamp_kinds"


class _Place:
    """Stands for a tensor that forward saved: its position among the leaves of the inputs and then the outputs."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Notes:
    """Replaces ctx in a forward that takes one, under torch.func."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        # Which inputs are differentiated is unknown here, so this names all that can be.
        self.needs_input_grad = tuple(
            isinstance(arg, Tensor) and (arg.is_floating_point() or arg.is_complex()) for arg in args
        )
        self._done: dict[str, tuple[Any, ...]] = {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in ("save_for_backward", "save_for_forward", "mark_non_differentiable", "set_materialize_grads"):
            raise AttributeError(f"custom_function: ctx has no {name!r} in a forward that runs under torch.func")
        return lambda *args: self._done.__setitem__(name, args)


class _Call:
    """One call under torch.func of a forward that takes ctx; torch runs it as forward, setup_context and backward."""

    def __init__(self, own: Any, backward: Callable[..., Any]) -> None:
        self._own, self._backward = own, backward

    def forward(self, *args: Any) -> tuple[Any, ...]:
        """Return the outputs of own's forward, followed by the intermediates that it saved."""
        notes = _Notes(args)
        result = self._own.forward(notes, *args)
        self._single, self._arguments = not isinstance(result, tuple), len(args)
        outputs = [result] if self._single else list(result)
        self._outputs = len(outputs)
        known = [*_tree.leaves(args), *outputs]

        def place(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            for index, other in enumerate(known):
                if other is value:
                    return _Place(index)
            known.append(value)
            outputs.append(value.detach())  # an alias, because the tensor itself may be another module's parameter
            return _Place(len(known) - 1)

        attributes = {name: value for name, value in vars(notes).items() if name not in ("needs_input_grad", "_done")}
        self._kept = _tree.map_leaves(place, *_tree.flatten((notes._done, attributes)))
        return tuple(outputs)

    def set_up(self, ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        """Repeat on ctx what own's forward did to it."""
        ctx.funcamp_region, known = _region(inputs), [*_tree.leaves(inputs), *outputs]
        done, attributes = _tree.map_leaves(
            lambda value: known[value.index] if isinstance(value, _Place) else value, *_tree.flatten(self._kept)
        )
        if intermediates := outputs[self._outputs :]:
            done["mark_non_differentiable"] = (*done.get("mark_non_differentiable", ()), *intermediates)
        for name, given in done.items():
            getattr(ctx, name)(*given)
        for name, value in attributes.items():
            setattr(ctx, name, value)

    def backward(self, ctx: Any, *grads: Any) -> Any:
        """Return own's backward, with a None for each argument that it leaves out."""
        result = self._backward(ctx, *grads[: self._outputs])
        result = result if isinstance(result, tuple) else (result,)
        return (*result, *[None] * (self._arguments - len(result)))

    def run(self, body: dict[str, Any], name: str, args: Any) -> Any:
        """Apply own without ctx in its forward."""
        methods = {"forward": staticmethod(self.forward), "setup_context": staticmethod(self.set_up)}
        body = {**body, **methods, name: staticmethod(self.backward), "generate_vmap_rule": True}
        runs: Any = type(self._own.__name__, (self._own,), body)
        out = runs.apply(*args)
        return out[0] if self._single else out[: self._outputs]


class _Kinds(NamedTuple):
    """What runs instead of a user's class."""

    plain: Any
    """A subclass that keeps autocast for backward."""
    under_func: Callable[..., Any]
    """Applies the class under torch.func."""
    signature: inspect.Signature
    takes_ctx: bool


def _kinds_of(own: Any) -> _Kinds:
    known: _Kinds | None = vars(own).get(_KINDS)
    if known is not None:
        return known
    takes_ctx = own.setup_context is Function.setup_context
    name = "backward" if own.vjp is Function.vjp else "vjp"
    backward_of = getattr(own, name)

    def forward(ctx: Any, *args: Any) -> Any:
        ctx.funcamp_region = _region(args)
        return own.forward(ctx, *args)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.funcamp_region = _region(inputs)
        own.setup_context(ctx, inputs, output)

    def backward(ctx: Any, *grads: Any) -> Any:
        with _autocast(ctx.funcamp_region):
            return backward_of(ctx, *grads)

    # torch.func calls apply again at every nested level: this must be torch's own, on the class that runs.
    body: dict[str, Any] = {
        "apply": vars(Function)["apply"],
        "__module__": own.__module__,
        name: staticmethod(backward),
    }
    more: dict[str, Any] = {"forward": staticmethod(forward)}
    if not takes_ctx:
        more = {"setup_context": staticmethod(setup_context), "generate_vmap_rule": own.vmap is Function.vmap}
    plain: Any = type(own.__name__, (own,), body | more)

    def under_func(*args: Any) -> Any:
        return _Call(own, backward).run(body, name, args) if takes_ctx else plain.apply(*args)

    kinds = _Kinds(plain, under_func, inspect.signature(own.forward), takes_ctx)
    setattr(own, _KINDS, kinds)
    return kinds


def apply(own: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a decorated class as its `apply` classmethod; Dynamo matches `self.fn = F.apply` by this name."""
    kinds = _kinds_of(own)
    bound = kinds.signature.bind(*((None,) if kinds.takes_ctx else ()), *args, **kwargs)
    if bound.kwargs:
        bound.apply_defaults()
    if bound.kwargs:
        raise TypeError(f"{own.__name__}.apply: forward must not have keyword-only arguments; got {bound.kwargs}")
    values, region = _cast(bound.args[kinds.takes_ctx :], getattr(own, _CAST))
    with _autocast(region):
        return (kinds.under_func if _upstream.transforms_active() else kinds.plain.apply)(*values)


_Region = tuple[str, torch.dtype, bool]


def _region(args: Any) -> _Region | None:
    """Return the current autocast: device type, dtype, whether it is on; None if not available."""
    kind = next((leaf.device.type for leaf in _tree.leaves(args) if isinstance(leaf, Tensor)), "meta")
    if not torch.amp.is_autocast_available(kind):
        return None
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


def _autocast(region: _Region | None) -> Any:
    return contextlib.nullcontext() if region is None else torch.autocast(region[0], region[1], enabled=region[2])


def _cast(args: tuple[Any, ...], dtype: torch.dtype | None) -> tuple[tuple[Any, ...], _Region | None]:
    """Return forward's arguments and the autocast around it; None keeps the caller's."""
    region = None if dtype is None else _region(args)
    if dtype is None or region is None or not region[2]:
        return args, None
    leaves, spec = _tree.flatten(args)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64:
            leaves[index] = leaf.to(dtype) if leaf.device.type == region[0] else leaf
    return _tree.unflatten(leaves, spec), (region[0], region[1], False)


def _put_in_graphs(cls: Any) -> None:
    torch.compiler.allow_in_graph(cls)  # type: ignore[no-untyped-call]


def _init_subclass(cls: Any, /, **kwargs: Any) -> None:
    super(Function, cls).__init_subclass__(**kwargs)
    if vars(cls).get("apply") is not vars(Function)["apply"]:  # a user's class, not one of `_kinds_of`
        _put_in_graphs(cls)


@overload
def custom_function(cls: F, *, cast_inputs: torch.dtype | None = None) -> F: ...
@overload
def custom_function(cls: None = None, *, cast_inputs: torch.dtype | None = None) -> Callable[[F], F]: ...
def custom_function(cls: Any = None, *, cast_inputs: torch.dtype | None = None) -> Any:
    """Make an autograd.Function work under autocast, torch.func and torch.compile.

    Decorates a class with `forward(ctx, ...)`, or with `forward(...)` and `setup_context`. Both get the behavior of
    torch.amp.custom_fwd and custom_bwd: backward runs under the autocast that forward saw, and cast_inputs applies
    under autocast. A forward that takes ctx also runs under torch.func (without mark_dirty or jvp): the intermediates
    that it saves become further outputs, which a second derivative ignores, as torch ignores intermediates. vmap needs
    no rule. torch.compile puts the Function into its graph as one node, so its backward cannot be dropped. Therefore
    its arguments must be tensors, numbers, strings and containers of these. Anything else that forward and backward
    read is a constant of the program and must not be a tensor. A subclass inherits all this. Pure if forward is pure;
    no sync.

    Args:
        cls: the class; its methods may already have torch.amp.custom_fwd and custom_bwd. A class of another library
            works too: `Theirs = custom_function(Theirs)`.
        cast_inputs: under autocast, cast the floating-point inputs except float64 to this dtype, and run forward and
            backward without autocast; None changes neither.

    Returns:
        A subclass of cls with its name; call its `apply`.

    Raises:
        TypeError: cls is not a subclass of autograd.Function, or cast_inputs not a floating-point dtype; from apply:
            forward has keyword-only arguments.

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
    body = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__init_subclass__": classmethod(_init_subclass),
        "apply": classmethod(apply),
        _CAST: getattr(cls, _CAST, None) if cast_inputs is None else cast_inputs,
    }
    made = type(cls.__name__, (cls,), body)
    _put_in_graphs(made)
    return made
