"""`custom_function`: make an autograd.Function keep its backward and autocast under all transforms."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar, overload

import torch
from torch import Tensor
from torch.autograd import Function

from funcamp import _tree, _upstream
from funcamp._types import Args

F = TypeVar("F", bound=type[Function])

#: Attributes of a decorated class: the argument cast_inputs, and the `_Implementation` that runs instead of the class.
_CAST_ATTRIBUTE = "_funcamp_cast_inputs"
_IMPLEMENTATION_ATTRIBUTE = "_funcamp_implementation"


class _SavedTensor:
    """Stands for a tensor that forward saved: its position among the leaves of the inputs and then the outputs."""

    def __init__(self, position: int) -> None:
        self.position = position


def _position_of(tensor: Tensor, known_tensors: list[object]) -> int | None:
    """Return the position of a tensor among others, by identity; None if it is not there."""
    for position, known_tensor in enumerate(known_tensors):
        if known_tensor is tensor:
            return position
    return None


class _RecordingContext:
    """Replaces ctx in a forward that takes one, under torch.func: records what the forward does to it.

    It has the methods of ctx that a forward may call under torch.func.
    """

    def __init__(self, args: Args) -> None:
        # Which inputs are differentiated is unknown here, so this names all that can be.
        self.needs_input_grad = tuple(
            isinstance(arg, Tensor) and (arg.is_floating_point() or arg.is_complex()) for arg in args
        )
        self._method_calls: dict[str, Args] = {}

    def save_for_backward(self, *args: object) -> None:
        self._method_calls["save_for_backward"] = args

    def save_for_forward(self, *args: object) -> None:
        self._method_calls["save_for_forward"] = args

    def mark_non_differentiable(self, *args: object) -> None:
        self._method_calls["mark_non_differentiable"] = args

    def set_materialize_grads(self, *args: object) -> None:
        self._method_calls["set_materialize_grads"] = args

    # Called for what is defined nowhere else.
    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"custom_function: ctx has no {name!r} in a forward that runs under torch.func")


# Not a method: a forward may set any attribute of ctx.
def _attributes_set_on(context: _RecordingContext) -> dict[str, object]:
    """Return the attributes that forward set."""
    own_attributes = ("needs_input_grad", "_method_calls")
    return {name: value for name, value in vars(context).items() if name not in own_attributes}


class _Context(Protocol):
    """What a decorated class stores on torch's ctx, besides what the user's class does."""

    funcamp_region: _Region | None


class _CallUnderFunc:
    """One call under torch.func of a forward that takes ctx; torch runs it as forward, setup_context and backward."""

    def __init__(self, function: type[Function], backward: Callable[..., object]) -> None:
        self._function = function
        self._backward = backward

    def forward(self, *args: object) -> Args:
        """Return the outputs of the function's forward, followed by the intermediates that it saved."""
        context = _RecordingContext(args)
        result = self._function.forward(context, *args)
        self._has_one_output = not isinstance(result, tuple)
        outputs = [result] if self._has_one_output else list(result)
        self._argument_count = len(args)
        self._output_count = len(outputs)
        # Tensors are noted by their position, because torch passes `set_up` other objects for them.
        known_tensors = [*_tree.leaves(args), *outputs]
        notes, spec = _tree.flatten((context._method_calls, _attributes_set_on(context)))
        for number, value in enumerate(notes):
            if not isinstance(value, Tensor):
                continue
            position = _position_of(value, known_tensors)
            if position is None:
                position = len(known_tensors)
                known_tensors.append(value)
                outputs.append(value.detach())  # an alias, because the tensor itself may be another module's parameter
            notes[number] = _SavedTensor(position)
        self._notes = _tree.unflatten(notes, spec)
        return tuple(outputs)

    def set_up(self, ctx: _Context, inputs: Args, outputs: Args) -> None:
        """Repeat on ctx what the function's forward did to it."""
        ctx.funcamp_region = _region(inputs)
        known_tensors = [*_tree.leaves(inputs), *outputs]
        notes, spec = _tree.flatten(self._notes)
        for number, value in enumerate(notes):
            if isinstance(value, _SavedTensor):
                notes[number] = known_tensors[value.position]
        method_calls, attributes = _tree.unflatten(notes, spec)
        # A second derivative ignores intermediates, as torch does.
        intermediates = outputs[self._output_count :]
        if intermediates:
            not_differentiable = method_calls.get("mark_non_differentiable", ())
            method_calls["mark_non_differentiable"] = (*not_differentiable, *intermediates)
        for name, arguments in method_calls.items():
            getattr(ctx, name)(*arguments)
        for name, value in attributes.items():
            setattr(ctx, name, value)

    def backward(self, ctx: _Context, *grads: object) -> Args:
        """Return the function's backward, with a None for each argument that it leaves out."""
        result = self._backward(ctx, *grads[: self._output_count])
        if not isinstance(result, tuple):
            result = (result,)
        missing_count = self._argument_count - len(result)
        return (*result, *[None] * missing_count)

    def run(self, body: dict[str, object], backward_name: str, args: Args) -> object:
        """Apply the function without ctx in its forward."""
        methods = {
            "forward": staticmethod(self.forward),
            "setup_context": staticmethod(self.set_up),
            backward_name: staticmethod(self.backward),
            "generate_vmap_rule": True,
        }
        function_without_ctx: Any = type(self._function.__name__, (self._function,), {**body, **methods})
        outputs = function_without_ctx.apply(*args)
        return outputs[0] if self._has_one_output else outputs[: self._output_count]


class _Implementation(NamedTuple):
    """What runs instead of a user's class."""

    plain: Any
    """A subclass that keeps autocast for backward."""
    under_func: Callable[..., object]
    """Applies the class under torch.func."""
    signature: inspect.Signature
    """Of the user's forward."""
    takes_ctx: bool
    """Whether the user's forward takes ctx; otherwise the class has a `setup_context`."""


def _implementation_of(function: Any) -> _Implementation:
    """Return what runs instead of a decorated class, made at its first call."""
    existing: _Implementation | None = vars(function).get(_IMPLEMENTATION_ATTRIBUTE)
    if existing is not None:
        return existing
    takes_ctx = function.setup_context is Function.setup_context
    # torch takes either name for the same method.
    backward_name = "backward" if function.vjp is Function.vjp else "vjp"
    users_backward = getattr(function, backward_name)

    def forward(ctx: _Context, *args: object) -> object:
        ctx.funcamp_region = _region(args)
        return function.forward(ctx, *args)

    def setup_context(ctx: _Context, inputs: Args, output: object) -> None:
        ctx.funcamp_region = _region(inputs)
        function.setup_context(ctx, inputs, output)

    def backward(ctx: _Context, *grads: object) -> object:
        with _autocast(ctx.funcamp_region):
            return users_backward(ctx, *grads)

    # torch.func calls apply again at every nested level: this must be torch's own, on the class that runs.
    body: dict[str, object] = {
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

    def under_func(*args: object) -> object:
        if takes_ctx:
            return _CallUnderFunc(function, backward).run(body, backward_name, args)
        return plain.apply(*args)

    implementation = _Implementation(plain, under_func, inspect.signature(function.forward), takes_ctx)
    setattr(function, _IMPLEMENTATION_ATTRIBUTE, implementation)
    return implementation


def apply(cls: Any, /, *args: object, **kwargs: object) -> Any:
    """Run a decorated class as its `apply` classmethod; Dynamo matches `self.fn = F.apply` by this name."""
    implementation = _implementation_of(cls)
    # A stand-in for ctx, so that the signature binds.
    leading = (None,) if implementation.takes_ctx else ()
    bound = implementation.signature.bind(*leading, *args, **kwargs)
    if bound.kwargs:
        bound.apply_defaults()
    if bound.kwargs:
        raise TypeError(f"{cls.__name__}.apply: forward must not have keyword-only arguments; got {bound.kwargs}")
    values, region = _cast(bound.args[len(leading) :], getattr(cls, _CAST_ATTRIBUTE))
    run = implementation.under_func if _upstream.transforms_active() else implementation.plain.apply
    with _autocast(region):
        return run(*values)


class _Region(NamedTuple):
    """An autocast region."""

    device_type: str
    dtype: torch.dtype
    enabled: bool


def _region(args: Args) -> _Region | None:
    """Return the current autocast region of the arguments' type of device; None if autocast does not know it."""
    device_type = next((tensor.device.type for tensor in _tree.tensors_in(args)), "meta")
    if not torch.amp.is_autocast_available(device_type):
        return None
    return _Region(device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type))


def _autocast(region: _Region | None) -> contextlib.AbstractContextManager[object]:
    """Return the context manager of an autocast region; None changes nothing."""
    if region is None:
        return contextlib.nullcontext()
    return torch.autocast(region.device_type, region.dtype, enabled=region.enabled)


def _cast(args: Args, dtype: torch.dtype | None) -> tuple[Args, _Region | None]:
    """Return forward's arguments and the autocast region around it; None keeps the caller's."""
    region = None if dtype is None else _region(args)
    if dtype is None or region is None or not region.enabled:
        return args, None
    leaves, spec = _tree.flatten(args)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or leaf.device.type != region.device_type:
            continue
        if leaf.is_floating_point() and leaf.dtype != torch.float64:
            leaves[index] = leaf.to(dtype)
    return _tree.unflatten(leaves, spec), region._replace(enabled=False)


def _put_in_graphs(cls: type[Function]) -> None:
    """Let Dynamo put calls of a class into its graph as one node, so that its backward cannot be dropped."""
    torch.compiler.allow_in_graph(cls)  # type: ignore[no-untyped-call]


def _init_subclass(cls: Any, /, **kwargs: Any) -> None:
    """Do for a subclass of a decorated class what `custom_function` did for that."""
    super(Function, cls).__init_subclass__(**kwargs)
    if vars(cls).get("apply") is not vars(Function)["apply"]:  # a user's class, not one of `_implementation_of`
        _put_in_graphs(cls)


@overload
def custom_function(cls: F, *, cast_inputs: torch.dtype | None = None) -> F: ...
@overload
def custom_function(cls: None = None, *, cast_inputs: torch.dtype | None = None) -> Callable[[F], F]: ...
def custom_function(cls: F | None = None, *, cast_inputs: torch.dtype | None = None) -> F | Callable[[F], F]:
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
        _CAST_ATTRIBUTE: getattr(cls, _CAST_ATTRIBUTE, None) if cast_inputs is None else cast_inputs,
    }
    decorated = type(cls.__name__, (cls,), body)
    _put_in_graphs(decorated)
    return decorated
