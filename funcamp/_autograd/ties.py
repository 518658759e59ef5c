"""Ties: which names of a module's parameters and buffers are one tensor, and which tensors must not share memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from torch import Tensor, nn

from funcamp._autograd.module_walk import (
    ATTRIBUTE,
    BUFFER,
    FROZEN,
    TRAINED,
    Kind,
    kinds_of,
    plain_attributes,
    tensors_of,
)
from funcamp._memory import identity, overlaps


class Ties(NamedTuple):
    """Which names are one tensor: each name with the stored name, which is the first of them."""

    names: dict[str, str]
    """Of the trainable parameters."""
    buffer_names: dict[str, str]
    """Of the buffers, and of the frozen parameters in the memory of a buffer."""
    frozen_names: frozenset[str]
    """The names of these frozen parameters."""


def find_ties(model: nn.Module) -> Ties:
    """Return which names are one tensor.

    Raises:
        ValueError: two tensors share memory and are not one.
    """
    kinds = kinds_of(model)
    tensors = tensors_of(model)
    keys: dict[str, object] = {}
    for name, tensor in tensors.items():
        # Two Parameters on one memory are two for an optimizer; for the others only memory counts.
        keys[name] = id(tensor) if kinds[name] == TRAINED else identity(tensor)
    _refuse_common_memory(model, kinds, tensors, keys)

    trained = [name for name in kinds if kinds[name] == TRAINED]
    buffers = [name for name in kinds if kinds[name] == BUFFER]
    stored_trained = _first_names(trained, keys)
    stored_buffers = _first_names(buffers, keys)
    frozen_in_buffers = [name for name in kinds if kinds[name] == FROZEN and keys[name] in stored_buffers]
    names = {name: stored_trained[keys[name]] for name in trained}
    buffer_names = {name: stored_buffers[keys[name]] for name in (*buffers, *frozen_in_buffers)}
    return Ties(names, buffer_names, frozen_names=frozenset(frozen_in_buffers))


def check_ties(now: dict[str, str], before: dict[str, str]) -> None:
    """Raise ValueError if names have other stored names than before."""
    if now != before:
        raise ValueError(
            "module_loss: model must have the ties it had when the loss was made; tensors were tied or parted "
            "since (Module.to may part them): make the loss again, module_loss(model, ...), and the step of it"
        )


def _first_names(names: Iterable[str], keys: Mapping[str, object]) -> dict[object, str]:
    """Return the first name of each key."""
    first_names: dict[object, str] = {}
    for name in names:
        first_names.setdefault(keys[name], name)
    return first_names


def _refuse_common_memory(
    model: nn.Module, kinds: Mapping[str, Kind], tensors: Mapping[str, Tensor], keys: Mapping[str, object]
) -> None:
    """Raise ValueError if two tensors share memory without being one, so that a step of one would change the other."""
    attributes = plain_attributes(model)
    all_kinds = {**dict.fromkeys(attributes, ATTRIBUTE), **kinds}
    # Names of one tensor share its memory by design, so each tensor is compared under its first name.
    first_names = set(_first_names(tensors, keys).values())
    compared = {name: tensor for name, tensor in tensors.items() if name in first_names}
    for name, tensor in attributes.items():
        if name not in tensors:
            compared[name] = tensor
    for first, second in overlaps(compared):
        if _may_share_memory({all_kinds[first], all_kinds[second]}):
            continue
        raise ValueError(
            "module_loss: parameters and buffers must be one tensor or share no memory; got "
            f"{all_kinds[first]} {first!r} and {all_kinds[second]} {second!r}: assign the one to the other "
            "(layer.weight = other.weight), compute it in forward, or clone() it"
        )


def _may_share_memory(kinds: AbstractSet[Kind]) -> bool:
    """Return whether two tensors of these kinds may share memory."""
    # No step changes frozen parameters.
    if kinds == {FROZEN}:
        return True
    # A constant may have two names, as a buffer and an attribute; a step changes what is trained.
    return ATTRIBUTE in kinds and TRAINED not in kinds
