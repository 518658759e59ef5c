"""The objects of a run: keys for parameters, optimizers and scalers, and which tensor is whose gradient."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from funcamp import _upstream
from funcamp._audit.autograd_graph import Scaling
from funcamp._audit.events import Key

_is_wrapped = _upstream.find("torch._C._functorch.is_functorch_wrapped_tensor")

#: So many scaled losses are remembered, to notice when one is read.
_LOSSES = 8


class Tracked:
    """What the observer knows of a run's objects.

    A key is a number that no other object gets. No tensor is kept alive: a batch that requires gradients is a leaf too.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], Key]] = {}
        """The key of each object, by the object's address."""
        self._numbers = itertools.count(1)
        self._gradients: dict[int, weakref.ref[Tensor]] = {}
        """The parameter of each gradient, by the gradient's address."""
        self._addresses: dict[Key, int] = {}
        """The address of each parameter's gradient after its last backward pass."""
        self._magnitudes: list[tuple[weakref.ref[Tensor], Key]] = []
        """Absolute values of gradients."""
        self._losses: list[tuple[weakref.ref[Tensor], Scaling]] = []
        """Scaled losses."""

    def key(self, obj: Any) -> Key:
        """Return the key of an object."""
        reference, key = self._known.get(id(obj), (None, 0))
        if reference is None or reference() is not obj:  # the address may have been another object's
            key = next(self._numbers)
            self._known[id(obj)] = weakref.ref(obj), key
        return key

    def parameters(self, parameters: Iterable[Tensor]) -> tuple[Key, ...]:
        """Return the keys of parameters."""
        return tuple([self.key(parameter) for parameter in parameters])

    def parameters_of(self, optimizer: Any) -> tuple[Key, ...]:
        """Return the keys of an optimizer's parameters."""
        return self.parameters(parameter for group in optimizer.param_groups for parameter in group["params"])

    def note_gradients(self, leaves: Iterable[Tensor]) -> None:
        """Remember where the gradients of leaves are."""
        for leaf in leaves:
            address = address_of(leaf.grad)
            if address:
                self._gradients[address] = weakref.ref(leaf)
                self._addresses[self.key(leaf)] = address

    def gradients_among(self, tensors: Iterable[Any]) -> tuple[Key, ...]:
        """Return the parameters whose gradients, or magnitudes of gradients, are among some tensors."""
        keys = []
        for tensor in tensors:
            reference = self._gradients.get(address_of(tensor))
            leaf = None if reference is None else reference()
            # The memory of a gradient that is gone may be another tensor's now.
            if leaf is not None and address_of(leaf.grad) == address_of(tensor):
                keys.append(self.key(leaf))
            keys += [key for magnitude, key in self._magnitudes if magnitude() is tensor]
        return tuple(keys)

    def replaced_gradients(self, optimizer: Any) -> tuple[Key, ...]:
        """Return the parameters of an optimizer whose gradients are other tensors than after the backward pass."""
        keys = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                address = address_of(parameter.grad)
                if address and self._addresses.get(self.key(parameter), address) != address:
                    keys.append(self.key(parameter))
                    self.note_gradients([parameter])
        return tuple(keys)

    def keep_magnitude(self, magnitude: Any, key: Key) -> None:
        """Remember a gradient's absolute values."""
        self._magnitudes = [one for one in self._magnitudes if one[0]() is not None]
        self._magnitudes.append((weakref.ref(magnitude), key))

    def keep_loss(self, loss: Tensor, scaling: Scaling) -> None:
        """Remember a scaled loss."""
        self._losses = self._losses[1 - _LOSSES :]
        self._losses.append((weakref.ref(loss), scaling))

    def scaling_of(self, tensor: Any) -> Scaling | None:
        """Return how a loss was scaled; None if it is none."""
        for reference, scaling in self._losses:
            loss = reference()
            if loss is not None and (loss is tensor or address_of(loss) == address_of(tensor)):
                return scaling
        return None


def address_of(tensor: Any) -> int:
    """Return the address of a plain tensor's memory; 0 for any other object."""
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.device.type == "meta" or _is_wrapped(tensor):
        return 0
    return int(tensor.untyped_storage().data_ptr())
