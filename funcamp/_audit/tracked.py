"""The objects of a run: keys for parameters, optimizers and scalers, and which tensor is whose gradient."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from funcamp import _upstream
from funcamp._audit.autograd_graph import Scaling
from funcamp._audit.events import Key
from funcamp._audit.lines import Line
from funcamp._audit.powers import Power

_is_wrapped = _upstream.find("torch._C._functorch.is_functorch_wrapped_tensor")

#: So many scaled losses are remembered, to notice when one is read.
_LOSSES = 8
#: So many tensors that the loop summed over ranks are remembered, to notice when they become gradients.
_REDUCED = 256


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
        self._powers: dict[int, tuple[weakref.ref[Tensor], Power]] = {}
        """What is computed of gradients, by its address as an object."""
        self.scales: set[float] = set()
        """What scalers returned as their scales."""
        self._hooked: list[tuple[int, Key]] = []
        """The addresses of gradients that hooks have now, and their parameters."""
        self._losses: list[tuple[weakref.ref[Tensor], Scaling]] = []
        """Scaled losses."""
        self._reduced: list[tuple[weakref.ref[Tensor], Line]] = []
        """Copies of gradients that the loop summed over ranks, and where."""

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
        """Return the parameters whose gradients are among some tensors."""
        keys = []
        for tensor in tensors:
            address = address_of(tensor)
            keys += [key for hooked, key in self._hooked if address and hooked == address]
            reference = self._gradients.get(address)
            leaf = None if reference is None else reference()
            # The memory of a gradient that is gone may be another tensor's now.
            if leaf is not None and address_of(leaf.grad) == address:
                keys.append(self.key(leaf))
        return tuple(keys)

    @contextlib.contextmanager
    def hooked(self, gradient: Tensor | None, parameter: Key) -> Iterator[None]:
        """Context manager: a hook has a parameter's gradient."""
        self._hooked.append((address_of(gradient), parameter))
        try:
            yield
        finally:
            self._hooked.pop()

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

    def power_of(self, argument: Any) -> Power | None:
        """Return with which power of the scale an argument grows; None if it is not computed of gradients."""
        tensors = argument if isinstance(argument, (list, tuple)) else [argument]
        keys = self.gradients_among(tensors)
        if keys:
            return Power(keys)
        powers = [power for tensor in tensors for power in self._computed(tensor)]
        if not powers:
            return None
        parameters = tuple([key for power in powers for key in power.parameters])
        return Power(parameters, powers[0].degree, tuple([read for power in powers for read in power.reads]))

    def drop_powers(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Forget that tensors are computed of gradients; None for all."""
        if tensors is None:
            self._powers.clear()
        else:
            for tensor in tensors:
                self._powers.pop(id(tensor), None)

    def is_multiple(self, tensor: Any) -> bool:
        """Return whether a tensor is computed of gradients and times the scale as they are."""
        return any(power.degree == 1 for power in self._computed(tensor))

    def _computed(self, tensor: Any) -> list[Power]:
        """Return the power of what is computed of gradients; none for any other."""
        reference, power = self._powers.get(id(tensor), (None, None))
        return [power] if reference is not None and power is not None and reference() is tensor else []

    def keep_power(self, tensor: Tensor, power: Power) -> None:
        """Remember a tensor that is computed of gradients."""
        address = id(tensor)
        self._powers[address] = weakref.ref(tensor, lambda _: self._powers.pop(address, None)), power

    def keep_reduced(self, tensor: Tensor, line: Line) -> None:
        """Remember a tensor that was summed over ranks if it is computed of gradients, such as a flat one of many."""
        if self.power_of(tensor) is not None:
            self._reduced = [*self._reduced[1 - _REDUCED :], (weakref.ref(tensor), line)]

    def where_reduced(self, tensors: Iterable[Tensor]) -> Line | None:
        """Return where one of some tensors was summed over ranks, itself or the tensor whose memory it is."""
        addresses = {address_of(tensor) for tensor in tensors} - {0}
        for reference, line in self._reduced:
            reduced = reference()
            if reduced is not None and address_of(reduced) in addresses:
                return line
        return None

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
