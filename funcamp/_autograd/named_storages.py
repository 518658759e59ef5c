"""Tensors in memory by storage: the name of a tensor that shares bytes with another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from funcamp import _tree, _upstream
from funcamp._memory import extent

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor
else:
    FakeTensor = _upstream.find("torch._subclasses.fake_tensor.FakeTensor")


_WITH_STORAGE = (Tensor, nn.Parameter, FakeTensor)


class Place(NamedTuple):
    """The bytes of a tensor in its storage."""

    start: int
    end: int
    name: str


class NamedStorages:
    """Where named tensors are in memory, by storage; finds the name of a tensor that shares bytes with one of them.

    A weak reference to each storage keeps its address from being used again, and does not keep its memory alive.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._storages: dict[int, StorageWeakRef] = {}
        self._places: dict[int, list[Place]] = {}
        for name, tensor in tensors.items():
            tensor = _without_transforms(tensor)
            if type(tensor) in _WITH_STORAGE and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                self._storages.setdefault(storage._cdata, StorageWeakRef(storage))  # type: ignore[no-untyped-call]
                self._places.setdefault(storage._cdata, []).append(Place(*_bytes_in_storage(tensor), name))

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of a tensor that shares memory with this one, if there is one."""
        tensor = _without_transforms(tensor)
        storage = _storage_of(tensor)
        places = () if storage is None else self._places.get(storage, ())
        start, end = _bytes_in_storage(tensor) if places else (0, 0)
        return next((place.name for place in places if place.start < end and start < place.end), None)

    def without_storages_of(self, other: NamedStorages) -> NamedStorages:
        """Return these places without the storages that others are in too."""
        left = NamedStorages({})
        for cdata in self._storages.keys() - other._storages.keys():
            left._storages[cdata], left._places[cdata] = self._storages[cdata], self._places[cdata]
        return left


def memory_of(value: Tensor) -> tuple[int, int | None]:
    """Return what changes if a tensor is written in place or is given other memory."""
    value = _without_transforms(value)
    return 0 if value.is_inference() else value._version, _storage_of(value)


def _storage_of(tensor: Tensor) -> int | None:
    tensor = _without_transforms(tensor)
    if type(tensor) not in _WITH_STORAGE or tensor.layout != torch.strided:
        return None
    return int(tensor.untyped_storage()._cdata)


def _bytes_in_storage(tensor: Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + extent(tensor)


def _without_transforms(tensor: Tensor) -> Tensor:
    while _upstream.is_wrapped(tensor):
        tensor = _upstream.unwrapped(tensor)
    return tensor


def shares_memory(results: list[Tensor], arguments: Any) -> bool:
    """Return whether all results are in the memory of arguments: views, or none at all."""
    sources = [leaf for leaf in _tree.leaves(arguments) if isinstance(leaf, Tensor)]
    storages = {storage for storage in map(_storage_of, sources) if storage is not None}
    return all(_storage_of(result) in storages for result in results)
