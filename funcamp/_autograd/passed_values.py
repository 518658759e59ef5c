"""Give the values that a loss passes to a module what the module's own tensors have besides values.

A module may ask `isinstance(p, nn.Parameter)`, set attributes on its parameters and buffers, and register hooks on
their gradients. The values are other tensors, so these would be lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_NONE: frozenset[str] = frozenset()
#: The flag by which torch takes a tensor that is not of the class Parameter for one.
_IS_PARAMETER = "_is_param"


def with_hooks(values: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return values with the hooks (`register_hook`) of the module's own parameters.

    A hook is registered on a view that only this call has: the value itself may be a tensor of the caller, who would
    get a further hook at each call. The hook gets the gradient in the dtype of the module's own parameter.
    """
    hooked = {name: tensor._backward_hooks for name, tensor in own.items() if tensor._backward_hooks}
    if not hooked or not torch.is_grad_enabled():
        return values
    found, views = dict(values), {}
    for name, hooks in hooked.items():
        value = values[name]
        if value is own[name] or not value.requires_grad:
            continue
        if id(value) not in views:  # tied parameters: the hook gets the sum of their gradients
            view = value.view_as(value) if value.dtype == own[name].dtype else value.to(own[name].dtype)
            for hook in hooks.values():
                view.register_hook(hook)  # type: ignore[no-untyped-call]
            views[id(value)] = view if value.dtype == view.dtype else view.to(value.dtype)
        found[name] = views[id(value)]
    return found


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
