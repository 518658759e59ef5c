"""Give the values that a loss passes to a module what the module's own tensors have besides values.

A module may ask `isinstance(p, nn.Parameter)`, set attributes on its parameters and buffers, and register hooks on
their gradients. The values are other tensors, so these would be lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

_NO_NAMES: frozenset[str] = frozenset()
#: The flag by which torch takes a tensor that is not of the class Parameter for one.
_IS_PARAMETER = "_is_param"


def has_hooks(tensor: Tensor) -> bool:
    """Return whether a parameter has hooks on its gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def with_hooks(values: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return values with the hooks of the module's own parameters on their gradients.

    A hook is registered on a view that only this call has: the value itself may be a tensor of the caller, who would
    get a further hook at each call.
    """
    # At every call, because a caller may register or remove a hook between any two.
    hooked = [name for name, tensor in own.items() if has_hooks(tensor)]
    if not hooked or not torch.is_grad_enabled():
        return values
    with_views = dict(values)
    views: dict[int, Tensor] = {}
    for name in hooked:
        value = values[name]
        if value is own[name] or not value.requires_grad:
            continue
        if id(value) not in views:  # tied parameters: the hook gets the sum of their gradients
            views[id(value)] = _hooked_view(name, value, own[name])
        with_views[name] = views[id(value)]
    return with_views


def _hooked_view(name: str, value: Tensor, parameter: Tensor) -> Tensor:
    """Return a view of a value, whose gradient passes the hooks of a parameter."""
    view = value.view_as(value)
    for hook in (parameter._backward_hooks or {}).values():
        view.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        view.register_hook(_as_gradient_hook(hook, view.detach(), name))  # type: ignore[no-untyped-call]
    return view


def _as_gradient_hook(hook: Callable[[Tensor], None], value: Tensor, name: str) -> Callable[[Tensor], Tensor]:
    """Return a hook of a gradient that does what a hook of register_post_accumulate_grad_hook does to `.grad`.

    Args:
        hook: takes a parameter, of which it may change `.grad`.
        value: what the parameter is in this call.
        name: its name, for errors.
    """

    def change(gradient: Tensor) -> Tensor:
        parameter = value.detach().requires_grad_()
        version_before = parameter._version
        parameter.grad = gradient.detach().clone()
        reason = None
        with torch.no_grad():
            try:
                hook(parameter)
            except KeyError:
                reason = "looks the parameter up, but a step passes other tensors"
        changed_gradient = parameter.grad
        if parameter._version != version_before:
            reason = "writes the parameter"
        elif changed_gradient is None:
            reason = "drops the gradient"
        if reason is not None or changed_gradient is None:
            raise ValueError(
                "module_loss: a hook of register_post_accumulate_grad_hook must read and change the parameter's .grad "
                f"only; that of {name!r} {reason}: for an optimizer in the backward pass leave it out, as the step "
                "takes its own"
            )
        return changed_gradient

    return change


@contextlib.contextmanager
def like_own_tensors(values: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Iterator[None]:
    """Context manager: values have the attributes of the module's own tensors, and those of parameters are parameters.

    Afterwards the values are as before, because a caller or a state has them. Attributes that the call sets on a value
    stay on the module's own tensor, as they do if it is called itself.
    """
    # For each value: its attributes, those of the module's own tensor, and the names that it had before. Plain tuples
    # and one function, because this runs in every eager call: with a NamedTuple and a function for each value it takes
    # 110 instead of 70 microseconds for 146 tensors.
    changes: list[tuple[dict[str, object], dict[str, object], frozenset[str]]] = []
    for name, own_tensor in own.items():
        value = values.get(name)
        if value is None or value is own_tensor:
            continue
        attributes = value.__dict__
        own_attributes = own_tensor.__dict__
        names_before = frozenset(attributes) if attributes else _NO_NAMES
        # The exact class first: isinstance of a Parameter runs Python.
        if type(own_tensor) is nn.Parameter or isinstance(own_tensor, nn.Parameter):
            attributes[_IS_PARAMETER] = True
        for key, item in own_attributes.items():
            attributes.setdefault(key, item)
        changes.append((attributes, own_attributes, names_before))
    try:
        yield
    finally:
        for attributes, own_attributes, names_before in changes:
            added_keys = [key for key in attributes if key not in names_before]
            for key in added_keys:
                if key == _IS_PARAMETER:
                    del attributes[key]
                elif key in own_attributes or not key.startswith("_"):  # others are of torch's own subclasses
                    own_attributes[key] = attributes.pop(key)
