"""Give the values that a loss passes to a module what the module's own tensors have besides values.

A module may ask `isinstance(p, nn.Parameter)`, set attributes on its parameters and buffers, and register hooks on
their gradients. The values are other tensors, so these would be lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_NONE: frozenset[str] = frozenset()
#: The flag by which torch takes a tensor that is not of the class Parameter for one.
_IS_PARAMETER = "_is_param"


def has_hooks(tensor: Tensor) -> bool:
    """Return whether a parameter has hooks on its gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def with_hooks(values: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return values with the hooks of the module's own parameters on their gradients.

    A hook is registered on a view that only this call has: the value itself may be a tensor of the caller, who would
    get a further hook at each call. The hook gets the gradient in the dtype of the module's own parameter.
    """
    hooked = [name for name, tensor in own.items() if has_hooks(tensor)]
    if not hooked or not torch.is_grad_enabled():
        return values
    found, views = dict(values), {}
    for name in hooked:
        value, parameter = values[name], own[name]
        if value is parameter or not value.requires_grad:
            continue
        if id(value) not in views:  # tied parameters: the hook gets the sum of their gradients
            view = value.view_as(value) if value.dtype == parameter.dtype else value.to(parameter.dtype)
            for hook in (parameter._backward_hooks or {}).values():
                view.register_hook(hook)  # type: ignore[no-untyped-call]
            for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                view.register_hook(_after_accumulation(hook, view.detach(), name))  # type: ignore[no-untyped-call]
            views[id(value)] = view if value.dtype == view.dtype else view.to(value.dtype)
        found[name] = views[id(value)]
    return found


def _after_accumulation(hook: Callable[[Tensor], None], value: Tensor, name: str) -> Callable[[Tensor], Tensor]:
    """Return a hook of a gradient that does what a hook of register_post_accumulate_grad_hook does to `.grad`."""

    def change(gradient: Tensor) -> Tensor:
        parameter = value.detach().requires_grad_()
        version = parameter._version
        parameter.grad = gradient.detach().clone()
        reason = None
        with torch.no_grad():
            try:
                hook(parameter)
            except KeyError:
                reason = "looks the parameter up, but a step passes other tensors"
        changed = parameter.grad
        if parameter._version != version:
            reason = "writes the parameter"
        elif changed is None:
            reason = "drops the gradient"
        if reason is not None or changed is None:
            raise ValueError(
                "module_loss: a hook of register_post_accumulate_grad_hook must read and change the parameter's .grad "
                f"only; that of {name!r} {reason}: for an optimizer in the backward pass leave it out, as the step "
                "takes its own"
            )
        return changed

    return change


@contextlib.contextmanager
def like_own_tensors(values: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> Iterator[None]:
    """Context manager: values have the attributes of the module's own tensors, and those of parameters are parameters.

    Afterwards the values are as before, because a caller or a state has them. Attributes that the call sets on a value
    stay on the module's own tensor, as they do if it is called itself.
    """
    given: list[tuple[dict[str, Any], dict[str, Any], frozenset[str]]] = []
    for name, tensor in own.items():
        value = values.get(name)
        if value is None or value is tensor:
            continue
        attributes = value.__dict__
        known = frozenset(attributes) if attributes else _NONE
        if type(tensor) is nn.Parameter or isinstance(tensor, nn.Parameter):
            attributes[_IS_PARAMETER] = True
        kept = tensor.__dict__
        for key, item in kept.items():
            attributes.setdefault(key, item)
        given.append((attributes, kept, known))
    try:
        yield
    finally:
        for attributes, kept, known in given:
            for key in [key for key in attributes if key not in known]:
                if key == _IS_PARAMETER:
                    del attributes[key]
                elif key in kept or not key.startswith("_"):  # others are of torch's own subclasses
                    kept[key] = attributes.pop(key)
