"""Tensor subclasses with plain tensors as parts (DTensor): taken apart for a graph, and built from its results.

A graph knows plain tensors only. What a subclass has besides them is its wrapper.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from funcamp import _upstream

if TYPE_CHECKING:
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass
else:
    is_traceable_wrapper_subclass = _upstream.find("torch.utils._python_dispatch.is_traceable_wrapper_subclass")

#: The classes of tensors that are plain, and no subclass with attributes or operations besides torch's.
PLAIN_TENSORS = {Tensor, torch.nn.Parameter}


class Wrapper(NamedTuple):
    """Everything about a tensor subclass (DTensor) except its plain tensors."""

    subclass: Any
    parts: dict[str, Wrapper | None]
    """For each attribute that is a tensor, by name, its wrapper; None for a plain tensor."""
    other_attributes: dict[str, object]
    """Attributes that are not tensors: a device mesh, since torch 2.13."""
    context: object
    """What `__tensor_flatten__` returned besides the names of the attributes."""
    size: torch.Size
    stride: tuple[int, ...]


def wrapper_of(tensor: Tensor) -> Wrapper | None:
    """Return the wrapper of a tensor subclass; None for a plain tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return None
    names, context = tensor.__tensor_flatten__()
    parts: dict[str, Wrapper | None] = {}
    other_attributes: dict[str, object] = {}
    for name in names:
        attribute = getattr(tensor, name)
        if isinstance(attribute, Tensor):
            parts[name] = wrapper_of(attribute)
        else:
            other_attributes[name] = attribute
    return Wrapper(type(tensor), parts, other_attributes, context, tensor.size(), tensor.stride())


def unwrap_all(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return plain tensors themselves, and in place of a tensor subclass its plain parts, in the order of `wrap`."""
    plain: list[Tensor] = []
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            attributes = [getattr(tensor, name) for name in names]
            plain += unwrap_all([attribute for attribute in attributes if isinstance(attribute, Tensor)])
        else:
            plain.append(tensor)
    return plain


def wrap(wrapper: Wrapper | None, plain: Iterator[Tensor]) -> Tensor:
    """Return a tensor of this wrapper from the next plain ones; without a wrapper, the next one itself."""
    if wrapper is None:
        return next(plain)
    attributes = dict(wrapper.other_attributes)
    for name, part_wrapper in wrapper.parts.items():
        attributes[name] = wrap(part_wrapper, plain)
    tensor: Tensor = wrapper.subclass.__tensor_unflatten__(attributes, wrapper.context, wrapper.size, wrapper.stride)
    return tensor
