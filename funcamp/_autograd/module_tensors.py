"""What a loss knows of the tensors of its module: which there are, which names are one, and where they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Size, Tensor, nn

from funcamp._autograd.module_walk import TensorSlots
from funcamp._autograd.ties import find_ties


@dataclasses.dataclass(frozen=True)
class ModuleTensors:
    """The parameters and buffers of a module for which a loss passes other tensors, as they were when it was made."""

    names: dict[str, str]
    """The name of every trainable parameter, to the name under which it is stored (different for tied ones)."""
    buffer_names: dict[str, str]
    """The same for buffers, and for frozen parameters that share memory with a buffer."""
    frozen_names: frozenset[str]
    """The names of these frozen parameters."""
    uncast_names: frozenset[str]
    """The stored names of the parameters that autocast does not cast, such as those of embeddings."""
    slots: TensorSlots
    """Where the module has the parameters and buffers of `names` and `buffer_names`."""

    tied_names: dict[str, str]
    """The part of `names` in which the stored name is another."""
    tied_buffer_names: dict[str, str]
    """The part of `buffer_names` in which the stored name is another."""

    def in_module(self) -> dict[str, Tensor]:
        """Return the tensors that the module has there now, by name."""
        return self.slots.tensors()

    def own_params(self) -> dict[str, Tensor]:
        """Return the module's trainable parameters by their stored names."""
        return _by_stored_name(self.in_module(), self.names)

    def own_buffers(self) -> dict[str, Tensor]:
        """Return the module's buffers by their stored names."""
        return _by_stored_name(self.in_module(), self.buffer_names)

    def values_by_name(self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors for the module by its names, in which a tied one has several.

        Args:
            params: by stored name.
            buffers: by stored name.
        """
        values = dict(params)
        for name, stored_name in self.tied_names.items():
            if name not in params and stored_name in params:
                values[name] = params[stored_name]
        for name, stored_name in self.buffer_names.items():
            # A frozen parameter is another object in the same memory, as in the module: an object that is both would
            # make `self.buffer += 1` register the buffer as a parameter.
            is_frozen_parameter = name in self.frozen_names
            buffer = buffers[stored_name]
            values[name] = buffer.detach() if is_frozen_parameter else buffer
        return values

    def check_buffers_are_tied(self, values: Mapping[str, Tensor], passed_values: Mapping[str, Tensor]) -> None:
        """Raise ValueError if a forward pass assigned one of two buffers that were one tensor."""
        for name, stored_name in self.tied_buffer_names.items():
            if name in self.frozen_names:
                # These are two objects in one memory (`values_by_name`): they are still one if neither was replaced.
                are_one = all(values[each] is passed_values[each] for each in (name, stored_name))
            else:
                are_one = values[name] is values[stored_name]
            if not are_one:
                raise ValueError(
                    f"module_loss: buffers that are one tensor must stay one; got {stored_name!r} and {name!r}, and "
                    "the forward pass assigned another tensor to one of them: register a clone() for the other"
                )

    def shapes(self) -> dict[str, Size]:
        """Return the shapes of the module's tensors by name."""
        return {name: tensor.shape for name, tensor in self.in_module().items()}


def describe(model: nn.Module) -> ModuleTensors:
    """Return what a loss has to know of the tensors of its module.

    Raises:
        ValueError: two parameters or buffers share memory without being one tensor.
    """
    ties = find_ties(model)
    return ModuleTensors(
        names=ties.names,
        buffer_names=ties.buffer_names,
        frozen_names=ties.frozen_names,
        uncast_names=_uncast_names(model, ties.names),
        slots=TensorSlots(model, ties.names.keys() | ties.buffer_names.keys()),
        tied_names=_names_stored_under_another(ties.names),
        tied_buffer_names=_names_stored_under_another(ties.buffer_names),
    )


def _uncast_names(model: nn.Module, names: Mapping[str, str]) -> frozenset[str]:
    """Return the stored names of parameters that autocast does not cast, also if another layer has them too.

    These are the parameters of embeddings, and those of a module with further layers, such as its positions.
    """
    layers = dict(model.named_modules(remove_duplicate=False))
    stored_names: set[str] = set()
    for name, stored_name in names.items():
        layer = layers[name.rpartition(".")[0]]
        has_layers = bool(layer._modules) and not isinstance(layer, nn.MultiheadAttention)
        if has_layers or isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
            stored_names.add(stored_name)
    return frozenset(stored_names)


def _names_stored_under_another(names: Mapping[str, str]) -> dict[str, str]:
    return {name: stored_name for name, stored_name in names.items() if name != stored_name}


def _by_stored_name(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors under the stored ones of these names."""
    return {stored_name: tensors[stored_name] for stored_name in names.values()}
