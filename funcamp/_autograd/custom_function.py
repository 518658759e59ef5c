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
#: Attributes of a decorated class: the argument cast_inputs, and the classes that run instead of it.
_CAST = "_funcamp_cast_inputs"
_KINDS = "_funcamp_kinds"

#: The methods of ctx that a forward may call under torch.func.
_METHODS_OF_CTX = ("save_for_backward", "save_for_forward", "mark_non_differentiable", "set_materialize_grads")


class _SavedTensor:
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
        self._method_calls: dict[str, tuple[Any, ...]] = {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in _METHODS_OF_CTX:
            raise AttributeError(f"custom_function: ctx has no {name!r} in a forward that runs under torch.func")

        def note(*args: Any) -> None:
            self._method_calls[name] = args

        return note


# Not a method: a forward may set any attribute of ctx.
def _attributes_of(notes: _Notes) -> dict[str, Any]:
    """Return the attributes that forward set."""
    known = ("needs_input_grad", "_method_calls")
    return {name: value for name, value in vars(notes).items() if name not in known}


class _Call:
    """One call under torch.func of a forward that takes ctx; torch runs it as forward, setup_context and backward."""

    def __init__(self, function: Any, backward: Callable[..., Any]) -> None:
        self._function = function
        self._backward = backward

    def forward(self, *args: Any) -> tuple[Any, ...]:
        """Return the outputs of the function's forward, followed by the intermediates that it saved."""
        notes = _Notes(args)
        result = self._function.forward(notes, *args)
        self._has_one_output = not isinstance(result, tuple)
        outputs = [result] if self._has_one_output else list(result)
        self._argument_count = len(args)
        self._output_count = len(outputs)
        known_tensors = [*_tree.leaves(args), *outputs]

        def stand_in(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            for index, known_tensor in enumerate(known_tensors):
                if known_tensor is value:
                    return _SavedTensor(index)
            known_tensors.append(value)
            outputs.append(value.detach())  # an alias, because the tensor itself may be another module's parameter
            return _SavedTensor(len(known_tensors) - 1)

        leaves, spec = _tree.flatten((notes._method_calls, _attributes_of(notes)))
        self._notes = _tree.map_leaves(stand_in, leaves, spec)
        return tuple(outputs)

    def set_up(self, ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        """Repeat on ctx what the function's forward did to it."""
        ctx.funcamp_region = _region(inputs)
        known_tensors = [*_tree.leaves(inputs), *outputs]

        def saved_tensor(value: Any) -> Any:
            return known_tensors[value.index] if isinstance(value, _SavedTensor) else value

        method_calls, attributes = _tree.map_leaves(saved_tensor, *_tree.flatten(self._notes))
        intermediates = outputs[self._output_count :]
        if intermediates:
            not_differentiable = method_calls.get("mark_non_differentiable", ())
            method_calls["mark_non_differentiable"] = (*not_differentiable, *intermediates)
        for name, arguments in method_calls.items():
            getattr(ctx, name)(*arguments)
        for name, value in attributes.items():
            setattr(ctx, name, value)

    def backward(self, ctx: Any, *grads: Any) -> Any:
        """Return the function's backward, with a None for each argument that it leaves out."""
        result = self._backward(ctx, *grads[: self._output_count])
        if not isinstance(result, tuple):
            result = (result,)
        missing_count = self._argument_count - len(result)
        return (*result, *[None] * missing_count)

    def run(self, body: dict[str, Any], backward_name: str, args: Any) -> Any:
        """Apply the function without ctx in its forward."""
        methods = {
            "forward": staticmethod(self.forward),
            "setup_context": staticmethod(self.set_up),
            backward_name: staticmethod(self.backward),
            "generate_vmap_rule": True,
        }
        runs: Any = type(self._function.__name__, (self._function,), {**body, **methods})
        out = runs.apply(*args)
        return out[0] if self._has_one_output else out[: self._output_count]


class _Kinds(NamedTuple):
    """What runs instead of a user's class."""

    plain: Any
    """A subclass that keeps autocast for backward."""
    under_func: Callable[..., Any]
    """Applies the class under torch.func."""
    signature: inspect.Signature
    takes_ctx: bool


def _kinds_of(function: Any) -> _Kinds:
    """Return what runs instead of a decorated class, made at its first call."""
    known: _Kinds | None = vars(function).get(_KINDS)
    if known is not None:
        return known
    takes_ctx = function.setup_context is Function.setup_context
    backward_name = "backward" if function.vjp is Function.vjp else "vjp"
    users_backward = getattr(function, backward_name)

    def forward(ctx: Any, *args: Any) -> Any:
        ctx.funcamp_region = _region(args)
        return function.forward(ctx, *args)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.funcamp_region = _region(inputs)
        function.setup_context(ctx, inputs, output)

    def backward(ctx: Any, *grads: Any) -> Any:
        with _autocast(ctx.funcamp_region):
            return users_backward(ctx, *grads)

    # torch.func calls apply again at every nested level: this must be torch's own, on the class that runs.
    body: dict[str, Any] = {
        "apply": vars(Function)["apply"],
        "__module__": function.__module__,
        backward_name: staticmethod(backward),
    }
    plain_body = dict(body)
    if takes_ctx:
        plain_body["forward"] = staticmethod(forward)
    else:
        plain_body["setup_context"] = staticmethod(setup_context)
        plain_body["generate_vmap_rule"] = function.vmap is Function.vmap
    plain: Any = type(function.__name__, (function,), plain_body)

    def under_func(*args: Any) -> Any:
        if takes_ctx:
            return _Call(function, backward).run(body, backward_name, args)
        return plain.apply(*args)

    kinds = _Kinds(plain, under_func, inspect.signature(function.forward), takes_ctx)
    setattr(function, _KINDS, kinds)
    return kinds


def apply(cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run a decorated class as its `apply` classmethod; Dynamo matches `self.fn = F.apply` by this name."""
    kinds = _kinds_of(cls)
    # A stand-in for ctx, so that the signature binds.
    leading = (None,) if kinds.takes_ctx else ()
    bound = kinds.signature.bind(*leading, *args, **kwargs)
    if bound.kwargs:
        bound.apply_defaults()
    if bound.kwargs:
        raise TypeError(f"{cls.__name__}.apply: forward must not have keyword-only arguments; got {bound.kwargs}")
    values, region = _cast(bound.args[len(leading) :], getattr(cls, _CAST))
    run = kinds.under_func if _upstream.transforms_active() else kinds.plain.apply
    with _autocast(region):
        return run(*values)


class _Region(NamedTuple):
    """An autocast region."""

    device_type: str
    dtype: torch.dtype
    enabled: bool


def _region(args: Any) -> _Region | None:
    """Return the current autocast region of the arguments' type of device; None if autocast does not know it."""
    device_type = next((tensor.device.type for tensor in _tree.tensors_in(args)), "meta")
    if not torch.amp.is_autocast_available(device_type):
        return None
    return _Region(device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type))


def _autocast(region: _Region | None) -> contextlib.AbstractContextManager[Any]:
    if region is None:
        return contextlib.nullcontext()
    return torch.autocast(region.device_type, region.dtype, enabled=region.enabled)


def _cast(args: tuple[Any, ...], dtype: torch.dtype | None) -> tuple[tuple[Any, ...], _Region | None]:
    """Return forward's arguments and the autocast region around it; None keeps the caller's."""
    region = None if dtype is None else _region(args)
    if dtype is None or region is None or not region.enabled:
        return args, None
    leaves, spec = _tree.flatten(args)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64:
            leaves[index] = leaf.to(dtype) if leaf.device.type == region.device_type else leaf
    return _tree.unflatten(leaves, spec), region._replace(enabled=False)


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
        return lambda decorated: custom_function(decorated, cast_inputs=cast_inputs)
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
    decorated = type(cls.__name__, (cls,), body)
    _put_in_graphs(decorated)
    return decorated
