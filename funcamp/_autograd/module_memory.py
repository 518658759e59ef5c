"""How a module shares the memory of a state's tensors, and what its `state_dict` is with a state's values."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from funcamp._autograd.module_tensors import ModuleTensors
from funcamp._autograd.module_walk import tensors_of
from funcamp._memory import rebind
from funcamp._types import StateDict


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


def state_dict_with(model: nn.Module, values: Mapping[str, Tensor]) -> StateDict:
    """Return copies of the entries of a model's `state_dict`, with these values in place of the tensors they name."""
    # By id, because `tensors_of` names the tensors of a shared module once, and a `state_dict` several times.
    values_by_id = {id(tensor): values[name] for name, tensor in tensors_of(model).items() if name in values}
    entries: StateDict = {}
    for name, entry in model.state_dict(keep_vars=True).items():
        if isinstance(entry, Tensor):
            value = values_by_id.get(id(entry), entry)
            entries[name] = value.detach().clone()
        else:
            entries[name] = entry
    return entries
