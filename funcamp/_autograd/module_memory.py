"""How a module shares the memory of a state's tensors, and how it has a state's values for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from funcamp._autograd.module_tensors import ModuleTensors
from funcamp._autograd.module_walk import TensorSlot
from funcamp._memory import rebind


def check_memory_can_be_shared(tensors: ModuleTensors) -> None:
    """Raise TypeError if a tensor of the module consists of several, whose memory cannot be replaced."""
    for name, tensor in (*tensors.own_params().items(), *tensors.own_buffers().items()):
        if hasattr(type(tensor), "__tensor_flatten__"):
            raise TypeError(
                "init: consume must be False if a parameter or buffer of the module is a DTensor or another "
                f"tensor subclass; got True, and {name!r} is a {type(tensor).__name__}"
            )


def share_params(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Make a module's parameters share the memory of the values of the same name."""
    for name, parameter in parameters.items():
        rebind(parameter, values[name])


def share_buffers(modules: nn.Module, tensors: ModuleTensors, values: Mapping[str, Tensor]) -> None:
    """Make buffers, and frozen parameters in the memory of buffers, share the memory of values.

    Args:
        modules: the module, and its copies that have the same tensors.
        tensors: the module's tensors.
        values: by stored name.
    """
    # New objects, as Module.to creates: a buffer that is a view would keep its base's memory alive.
    new_buffers = {stored_name: value.detach() for stored_name, value in values.items()}
    own_tensors = tensors.in_module()
    new_buffers_by_id: dict[int, Tensor] = {}
    for name, stored_name in tensors.buffer_names.items():
        own_tensor = own_tensors[name]
        new_buffer = new_buffers[stored_name]
        new_buffer.__dict__.update(own_tensor.__dict__)  # attributes that a user set
        new_buffers_by_id[id(own_tensor)] = new_buffer
    for module in modules.modules():
        for key, buffer in list(module._buffers.items()):
            if id(buffer) in new_buffers_by_id:
                module._buffers[key] = new_buffers_by_id[id(buffer)]
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) in new_buffers_by_id:
                rebind(parameter, new_buffers_by_id[id(parameter)])


@contextlib.contextmanager
def tensors_replaced(slots: Mapping[str, TensorSlot], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Context manager: a module has these values in the place of its tensors, which it has again afterwards.

    Args:
        slots: where the module has its parameters and buffers, by name.
        values: by the same names. Parameters become parameters, tied ones one.
    """
    own_tensors: list[tuple[TensorSlot, Tensor | None]] = []
    replacements: dict[int, Tensor] = {}
    try:
        for name, value in values.items():
            slot = slots[name]
            own = slot.owner[slot.key]
            own_tensors.append((slot, own))
            if id(own) not in replacements:
                replacements[id(own)] = _like(own, value)
            slot.owner[slot.key] = replacements[id(own)]
        yield
    finally:
        for slot, own in own_tensors:
            slot.owner[slot.key] = own


def _like(own: Tensor | None, value: Tensor) -> Tensor:
    """Return a value as a tensor of the kind and with the attributes of a module's own tensor."""
    like = value.detach()
    if isinstance(own, nn.Parameter):
        like = nn.Parameter(like, requires_grad=own.requires_grad)
    like.__dict__.update({} if own is None else own.__dict__)
    return like
