"""Tensors in memory, by storage: the name of a tensor that shares bytes with another, and what a write changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from funcamp import _upstream
from funcamp._memory import extent

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor
else:
    FakeTensor = _upstream.find("torch._subclasses.fake_tensor.FakeTensor")

#: The classes of tensors that have one storage with their bytes.
_WITH_STORAGE = (Tensor, nn.Parameter, FakeTensor)


class ByteRange(NamedTuple):
    """The bytes of a named tensor in its storage."""

    start: int
    end: int
    name: str


class MemoryMark(NamedTuple):
    """What changes if a tensor is written in place, or is given other memory."""

    version: int
    storage: int | None


class NamedStorages:
    """Where named tensors are in memory, by storage; finds the name of a tensor that shares bytes with one of them.

    A weak reference to each storage keeps its address from being used again, and does not keep its memory alive.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._storages: dict[int, StorageWeakRef] = {}
        self._ranges: dict[int, list[ByteRange]] = {}
        for name, wrapped in tensors.items():
            tensor = _without_transforms(wrapped)
            if not _has_storage(tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            self._storages.setdefault(key, StorageWeakRef(storage))  # type: ignore[no-untyped-call]
            self._ranges.setdefault(key, []).append(ByteRange(*_bytes_in_storage(tensor), name))

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of a tensor that shares memory with this one, if there is one."""
        tensor = _without_transforms(tensor)
        storage = storage_of(tensor)
        if storage is None or storage not in self._ranges:
            return None
        start, end = _bytes_in_storage(tensor)
        for byte_range in self._ranges[storage]:
            if byte_range.start < end and start < byte_range.end:
                return byte_range.name
        return None

    def without_storages_of(self, other: NamedStorages) -> NamedStorages:
        """Return these tensors without those that share a storage with one of the others."""
        remaining = NamedStorages({})
        for key in self._storages.keys() - other._storages.keys():
            remaining._storages[key] = self._storages[key]
            remaining._ranges[key] = self._ranges[key]
        return remaining


def memory_of(tensor: Tensor) -> MemoryMark:
    """Return what changes if a tensor is written in place or is given other memory."""
    tensor = _without_transforms(tensor)
    version = 0 if tensor.is_inference() else tensor._version
    return MemoryMark(version, storage_of(tensor))


def storage_of(tensor: Tensor) -> int | None:
    """Return a number for the storage of a tensor; None if it has no storage."""
    tensor = _without_transforms(tensor)
    return int(tensor.untyped_storage()._cdata) if _has_storage(tensor) else None


def share_memory(results: Iterable[Tensor], arguments: Iterable[Tensor]) -> bool:
    """Return whether all results are in the memory of arguments: views, or no results at all."""
    storages = set(map(storage_of, arguments)) - {None}
    return all(storage_of(result) in storages for result in results)


def _has_storage(tensor: Tensor) -> bool:
    """Return whether a tensor has one storage with its bytes: other subclasses may have several, or none."""
    return type(tensor) in _WITH_STORAGE and tensor.layout == torch.strided


def _bytes_in_storage(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor's bytes in its storage start and end."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + extent(tensor)


def _without_transforms(tensor: Tensor) -> Tensor:
    """Return the tensor that the wrappers of torch.func contain."""
    while _upstream.is_wrapped(tensor):
        tensor = _upstream.unwrapped(tensor)
    return tensor
