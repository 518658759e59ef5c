"""The objects of a run: the keys of parameters, optimizers and scalers, and which tensor is whose gradient."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from funcamp.report.autograd_graph import Scaling
from funcamp.report.events import Key
from funcamp.report.lines import Line
from funcamp.report.powers import Power, combined
from funcamp.report.tensors import address_of, overlap

#: The number of scaled losses that are remembered, to notice when one is read.
_LOSSES = 8
#: The number of tensors that the loop summed over ranks and that are remembered, to notice when they become gradients.
_REDUCED = 256


class _StoredGradient(NamedTuple):
    """A leaf and its gradient after a backward pass, or a result of `torch.autograd.grad`."""

    gradient: weakref.ref[Tensor]
    leaf: weakref.ref[Tensor] | None = None
    """None for a result of `torch.autograd.grad`."""

    def find(self) -> Tensor | None:
        """Return the leaf's gradient now; if there is no leaf, the gradient that it had, unless that is gone too."""
        leaf = None if self.leaf is None else self.leaf()
        return self.gradient() if leaf is None else leaf.grad


class _TakenGradient(NamedTuple):
    """A result of `torch.autograd.grad`."""

    gradient: weakref.ref[Tensor]
    version: int
    """torch counts the operations that wrote into it."""
    parameter: Key
    scaling: Scaling


class Tracked:
    """What the observer knows about a run's objects.

    A key is a number that no other object gets. All references are weak: a batch that requires gradients is a leaf too,
    and the auditor must not keep it alive.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[object], Key]] = {}
        """The key of each object, by the object's address."""
        self._numbers = itertools.count(1)
        self._gradients: dict[int, dict[Key, _StoredGradient]] = {}
        """The parameters whose gradients are in a memory, by its address: one, or all those of a flat buffer."""
        self._addresses: dict[Key, int] = {}
        """The address of each parameter's gradient after the last backward pass that added to it."""
        self._powers: dict[int, tuple[weakref.ref[Tensor], Power]] = {}
        """The power of each tensor that is computed from gradients, by the `id` of the tensor."""
        self.scales: set[float] = set()
        """The scales that scalers had: the loop may unscale gradients by one of these numbers."""
        self._hooked: list[tuple[int, Key]] = []
        """The addresses of the gradients that running hooks got, and their parameters, the innermost hook last."""
        self._optimized: dict[Key, weakref.ref[Tensor]] = {}
        """The parameters of optimizers."""
        self._taken: dict[int, _TakenGradient] = {}
        """The results of `torch.autograd.grad` for scaled losses, by their `id`."""
        self._weights: dict[int, weakref.ref[Tensor]] = {}
        """The parameters of optimizers, by the addresses of their memory."""
        self._losses: list[tuple[weakref.ref[Tensor], Scaling]] = []
        """Scaled losses."""
        self._reduced: list[tuple[weakref.ref[Tensor], Line]] = []
        """Copies of gradients that the loop summed over ranks, and where."""

    def key(self, obj: object) -> Key:
        """Return the key of an object."""
        reference, key = self._known.get(id(obj), (None, 0))
        if reference is None or reference() is not obj:  # an object that is gone may have had this address
            key = next(self._numbers)
            self._known[id(obj)] = weakref.ref(obj), key
        return key

    def parameters(self, parameters: Iterable[Tensor]) -> tuple[Key, ...]:
        """Return the keys of parameters."""
        return tuple([self.key(parameter) for parameter in parameters])

    def parameters_of(self, optimizer: Optimizer) -> tuple[Key, ...]:
        """Return the keys of an optimizer's parameters."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._weights |= {address_of(parameter): weakref.ref(parameter) for parameter in parameters}
        self._optimized |= {self.key(parameter): weakref.ref(parameter) for parameter in parameters}
        return self.parameters(parameters)

    def is_parameter(self, tensor: Tensor) -> bool:
        """Return whether a tensor is the parameter of an optimizer, or shares its memory."""
        address = address_of(tensor)
        parameter = self._weights[address]() if address in self._weights else None
        return address != 0 and address_of(parameter) == address

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
                stored = _StoredGradient(weakref.ref(gradient), weakref.ref(leaf))
                self._gradients.setdefault(address, {})[key] = stored
                self._addresses[key] = address

    def views_of_gradients(self, leaves: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the parameters of optimizers whose gradients are views of a leaf's gradient, each with that leaf.

        FSDP differentiates flat parameters, and gives the optimizer's parameters parts of their gradients.
        """
        leaves_by_address = {address_of(leaf.grad): leaf for leaf in leaves}
        for reference in self._optimized.values():
            parameter = reference()
            address = 0 if parameter is None else address_of(parameter.grad)
            if parameter is not None and address in leaves_by_address.keys() - {0}:
                leaf = leaves_by_address[address]
                if parameter is not leaf and overlap(parameter.grad, leaf.grad):
                    yield parameter, leaf

    def remember_taken(self, gradients: Iterable[Tensor], inputs: Iterable[Tensor], scaling: Scaling) -> None:
        """Remember the results of `torch.autograd.grad`, for the loop may make them the gradients of its inputs."""
        self._taken = {number: taken for number, taken in self._taken.items() if taken.gradient() is not None}
        for gradient, leaf in zip(gradients, inputs):
            taken = _TakenGradient(weakref.ref(gradient), gradient._version, self.key(leaf), scaling)
            self._taken[id(gradient)] = taken
            address = address_of(gradient)
            if address:
                self._gradients.setdefault(address, {})[self.key(gradient)] = _StoredGradient(taken.gradient)

    def assigned_gradients(self, parameters: Iterable[Tensor]) -> Iterator[tuple[Key, Scaling]]:
        """Yield the parameters whose gradients are results of `torch.autograd.grad` that nothing has changed, once."""
        for parameter in parameters:
            gradient = parameter.grad
            taken = self._taken.pop(id(gradient), None)
            if gradient is None or taken is None or taken.gradient() is not gradient:
                continue
            if taken.parameter == self.key(parameter) and taken.version == gradient._version:
                self.remember_gradients([parameter])
                yield taken.parameter, taken.scaling

    def gradients_among(self, tensors: Iterable[object]) -> tuple[Key, ...]:
        """Return the parameters whose gradients are among some tensors."""
        keys = []
        for tensor in tensors:
            address = address_of(tensor)
            keys += [key for hooked, key in self._hooked if address and hooked == address]
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
            for key in stored.keys() - self._optimized.keys():
                del stored[key]

    @contextlib.contextmanager
    def hooked(self, gradient: Tensor | None, parameter: Key) -> Iterator[None]:
        """Context manager: a hook that got a parameter's gradient runs."""
        self._hooked.append((address_of(gradient), parameter))
        try:
            yield
        finally:
            self._hooked.pop()

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

    def reads_in_gradients(self, optimizer: Optimizer) -> tuple[int, ...]:
        """Return the reads from which an optimizer's gradients were computed, such as those that lack their mean."""
        gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        powers = [self.power_of_computed(gradient) for gradient in gradients]
        return tuple([read_id for power in powers if power is not None for read_id in power.read_ids])

    def power_of(self, argument: object) -> Power | None:
        """Return how an operation's argument grows with the scale; None if it is not computed from gradients."""
        tensors = argument if isinstance(argument, (list, tuple)) else [argument]
        keys = self.gradients_among(tensors)
        if keys:
            return Power(keys)
        computed = [self.power_of_computed(tensor) for tensor in tensors]
        powers = [power for power in computed if power is not None]
        if not powers:
            return None
        return combined(powers, powers[0].degree)

    def forget_powers(self, tensors: Iterable[Tensor] | None = None) -> None:
        """Forget that tensors are computed from gradients; None for all tensors."""
        if tensors is None:
            self._powers.clear()
        else:
            for tensor in tensors:
                self._powers.pop(id(tensor), None)

    def grows_like_gradients(self, tensor: object) -> bool:
        """Return whether a tensor is computed from gradients and grows with the scale as they do."""
        power = self.power_of_computed(tensor)
        return power is not None and power.degree == 1

    def power_of_computed(self, tensor: object) -> Power | None:
        """Return the power of a tensor that is computed from gradients; None for anything else."""
        reference, power = self._powers.get(id(tensor), (None, None))
        is_same_tensor = reference is not None and reference() is tensor
        return power if is_same_tensor else None

    def remember_power(self, tensor: Tensor, power: Power) -> None:
        """Remember a tensor that is computed from gradients."""
        address = id(tensor)
        self._powers[address] = weakref.ref(tensor, lambda _: self._powers.pop(address, None)), power

    def remember_reduced(self, tensor: Tensor, line: Line) -> None:
        """Remember a tensor that was summed over ranks, if it is computed from gradients: one flat tensor of many."""
        if self.power_of(tensor) is not None:
            self._reduced = [*self._reduced[1 - _REDUCED :], (weakref.ref(tensor), line)]

    def where_reduced(self, tensors: Iterable[Tensor]) -> Line | None:
        """Return where the first of some tensors, or the tensor that it is a view of, was summed over ranks."""
        addresses = {address_of(tensor) for tensor in tensors} - {0}
        for reference, line in self._reduced:
            reduced = reference()
            if reduced is not None and address_of(reduced) in addresses:
                return line
        return None

    def remember_loss(self, loss: Tensor, scaling: Scaling) -> None:
        """Remember a scaled loss."""
        self._losses = self._losses[1 - _LOSSES :]
        self._losses.append((weakref.ref(loss), scaling))

    def scaling_of(self, tensor: object) -> Scaling | None:
        """Return how a scaled loss was scaled; None if the tensor is no scaled loss."""
        for reference, scaling in self._losses:
            loss = reference()
            if loss is not None and (loss is tensor or address_of(loss) == address_of(tensor)):
                return scaling
        return None
