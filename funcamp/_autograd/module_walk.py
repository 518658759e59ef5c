"""Walks through a module: its parameters and buffers by dotted name, and where they are."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Literal, NamedTuple

from torch import Tensor, nn

#: What a tensor is in its module, in the words of error messages.
Kind = Literal["a trainable parameter", "a frozen parameter", "a buffer", "a plain attribute"]
TRAINED: Kind = "a trainable parameter"
FROZEN: Kind = "a frozen parameter"
BUFFER: Kind = "a buffer"
ATTRIBUTE: Kind = "a plain attribute"


class TensorSlot(NamedTuple):
    """Where a module has a parameter or buffer."""

    owner: dict[str, Tensor | None]
    """The dict of parameters or of buffers of one module."""
    key: str
    """Its name there."""

    def tensor(self) -> Tensor | None:
        """Return the tensor that is there now."""
        # Not owner.get(key): the dicts of a scripted module have no such method.
        return self.owner[self.key] if self.key in self.owner else None  # noqa: SIM401

    def mark(self) -> object:
        """Return what changes if another tensor comes here, or if the tensor is written."""
        tensor = self.tensor()
        return None if tensor is None else (id(tensor), tensor._version)

    def requires_grad(self) -> bool:
        """Return whether there is a tensor here that requires a gradient."""
        tensor = self.tensor()
        return tensor is not None and tensor.requires_grad


def join(prefix: str, key: str) -> str:
    """Return the dotted name of a module's entry."""
    return f"{prefix}.{key}" if prefix else key


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by name, those of a shared module once."""
    # functional_call is wrong if one place is given under two names, hence named_modules without duplicates.
    tensors: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                tensors[join(prefix, key)] = tensor
    return tensors


def kinds_of(model: nn.Module) -> dict[str, Kind]:
    """Return what every parameter and buffer is, by name."""
    kinds: dict[str, Kind] = {}
    for prefix, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                kinds[join(prefix, key)] = TRAINED if parameter.requires_grad else FROZEN
        for key, buffer in module._buffers.items():
            if buffer is not None:
                kinds[join(prefix, key)] = BUFFER
    return kinds


def plain_attributes(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that modules have as plain attributes, without those that hooks recompute."""
    attributes: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            # An attribute that requires a gradient is found in the graph.
            if not isinstance(value, Tensor) or value.requires_grad:
                continue
            # torch's prune and older spectral_norm leave `weight` next to `weight_orig` until the next forward pass.
            if f"{key}_orig" in module._parameters:
                continue
            attributes[join(prefix, key)] = value
    return attributes


class TensorSlots:
    """Where a model has its parameters and buffers, by name.

    Found once, because torch takes longer to follow a dotted name than to run a small layer. `find` has to be called
    again if the model got another module or another dict in the place of one (`ModuleForm` notices it).

    Args:
        model: the model.
        names: the names of these tensors; None for all.
    """

    def __init__(self, model: nn.Module, names: AbstractSet[str] | None = None) -> None:
        self._model = model
        self._names = names
        self.by_name: dict[str, TensorSlot] = {}
        self.find()

    def find(self) -> None:
        """Look for the tensors in the model as it is now."""
        self.by_name.clear()
        for prefix, module in self._model.named_modules():
            for owner in (module._parameters, module._buffers):
                for key in owner.keys():  # noqa: SIM118  the dicts of a scripted module iterate otherwise
                    name = join(prefix, key)
                    if self._names is None or name in self._names:
                        self.by_name[name] = TensorSlot(owner, key)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are there now, by name."""
        tensors: dict[str, Tensor] = {}
        for name, slot in self.by_name.items():
            tensor = slot.tensor()
            if tensor is not None:
                tensors[name] = tensor
        return tensors
