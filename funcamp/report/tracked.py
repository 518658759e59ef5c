"""The objects of a run: the keys of parameters, optimizers and scalers, and which tensor is whose gradient."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from funcamp.report.autograd_graph import Scaling
from funcamp.report.derived import Derived, joined
from funcamp.report.events import Key
from funcamp.report.tensors import address_of, overlap

#: The number of scaled losses that are remembered, to notice when one is read.
_LOSSES = 8


class _StoredGradient(NamedTuple):
    """A gradient, and the leaf whose `grad` it is after a backward pass."""

    gradient: weakref.ref[Tensor]
    leaf: weakref.ref[Tensor] | None
    """None for a result of `torch.autograd.grad`, and for what a hook gets."""

    def find(self) -> Tensor | None:
        """Return the leaf's gradient now; if there is no leaf, the gradient that it had, unless that is gone too."""
        leaf = None if self.leaf is None else self.leaf()
        return self.gradient() if leaf is None else leaf.grad


class Tracked:
    """What the observer knows about a run's objects.

    A key is a number that no other object gets. All references are weak: a batch that requires gradients is a leaf too,
    and the auditor must not keep it alive.
    """

    def __init__(self) -> None:
        self._keys = WeakIdKeyDictionary()
        """The key of each object."""
        self._numbers = itertools.count(1)
        self._gradients: dict[int, dict[Key, _StoredGradient]] = {}
        """The parameters whose gradients are in a memory, by its address: one, or all those of a flat buffer."""
        self._addresses: dict[Key, int] = {}
        """The address of each parameter's gradient after the last backward pass that added to it."""
        self._derived = WeakTensorKeyDictionary()
        """What each tensor is that is computed from gradients."""
        self.scales: set[float] = set()
        """The scales that scalers had: the loop may unscale gradients by one of these numbers."""
        self._optimized: set[Key] = set()
        """The parameters of optimizers."""
        self._losses: list[tuple[weakref.ref[Tensor], Scaling]] = []
        """Scaled losses."""

    def key(self, obj: object) -> Key:
        """Return the key of an object."""
        if obj not in self._keys:
            self._keys[obj] = next(self._numbers)
        key: Key = self._keys[obj]
        return key

    def parameters(self, parameters: Iterable[Tensor]) -> tuple[Key, ...]:
        """Return the keys of parameters."""
        return tuple([self.key(parameter) for parameter in parameters])

    def parameters_of(self, optimizer: Optimizer) -> tuple[Key, ...]:
        """Return the keys of an optimizer's parameters."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        keys = self.parameters(parameters)
        self._optimized.update(keys)
        return keys

    def remember_gradients(self, leaves: Iterable[Tensor]) -> None:
        """Remember where the gradients of leaves are."""
        for leaf in leaves:
            gradient = leaf.grad
            address = address_of(gradient)
            if gradient is not None and address:
                key = self.key(leaf)
                former = self._addresses.get(key, 0)
                if former != address:
                    self._gradients.get(former, {}).pop(key, None)
                self.remember_gradient(key, gradient, weakref.ref(leaf))
                self._addresses[key] = address

    def remember_gradient(self, key: Key, gradient: Tensor, leaf: weakref.ref[Tensor] | None = None) -> None:
        """Remember a gradient that has an address, of a leaf if it is stored there."""
        address = address_of(gradient)
        if address:
            self._gradients.setdefault(address, {})[key] = _StoredGradient(weakref.ref(gradient), leaf)

    def gradients_among(self, tensors: Iterable[object]) -> tuple[Key, ...]:
        """Return the parameters whose gradients are among some tensors."""
        keys = []
        for tensor in tensors:
            address = address_of(tensor) if self._gradients else 0
            for key, stored in list(self._gradients.get(address, {}).items()):
                gradient = stored.find()
                # The memory of a gradient that is gone may belong to another tensor now.
                if address_of(gradient) != address:
                    del self._gradients[address][key]
                elif overlap(gradient, tensor):
                    keys.append(key)
        return tuple(keys)

    def forget_gradients(self, tensors: Iterable[Tensor]) -> None:
        """Forget that tensors are gradients, except those of an optimizer's parameters: the loop has unscaled them."""
        for tensor in tensors:
            stored = self._gradients.get(address_of(tensor), {})
            for key in stored.keys() - self._optimized:
                del stored[key]

    def replaced_gradients(self, parameters: Iterable[Tensor]) -> Iterator[tuple[Key, Tensor]]:
        """Yield the parameters whose gradients the loop has replaced since the backward pass, with the new gradients.

        The new gradients are remembered, so that each replacement is yielded once.
        """
        for parameter in parameters:
            gradient = parameter.grad
            address = address_of(gradient)
            key = self.key(parameter)
            if gradient is not None and address and self._addresses.get(key, address) != address:
                yield key, gradient
                self.remember_gradients([parameter])

    def derived(self, argument: object) -> Derived | None:
        """Return what an operation's argument is; None if it is neither a gradient nor computed from gradients."""
        tensors = argument if isinstance(argument, (list, tuple)) else [argument]
        keys = self.gradients_among(tensors)
        if keys:
            return Derived(keys)
        known = [derived for derived in map(self.derived_alone, tensors) if derived is not None]
        return joined(known) if known else None

    def derived_alone(self, tensor: object) -> Derived | None:
        """Return what a tensor is that is computed from gradients; None for anything else, a gradient too."""
        if not isinstance(tensor, Tensor) or tensor not in self._derived:
            return None
        derived: Derived = self._derived[tensor]
        return derived

    def remember_derived(self, tensor: Tensor, derived: Derived) -> None:
        """Remember a tensor that is computed from gradients."""
        self._derived[tensor] = derived

    def forget_derived(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Forget that tensors are computed from gradients; None for all tensors."""
        if tensors is None:
            self._derived = WeakTensorKeyDictionary()
        else:
            for tensor in tensors:
                if tensor in self._derived:
                    del self._derived[tensor]

    def remember_loss(self, loss: Tensor, scaling: Scaling) -> None:
        """Remember a scaled loss."""
        self._losses = self._losses[1 - _LOSSES :]
        self._losses.append((weakref.ref(loss), scaling))

    def scaling_of(self, tensor: object) -> Scaling | None:
        """Return how a scaled loss was scaled; None if the tensor is no scaled loss."""
        address = address_of(tensor)
        for reference, scaling in self._losses:
            loss = reference()
            if loss is not None and (loss is tensor or (address and address_of(loss) == address)):
                return scaling
        return None
