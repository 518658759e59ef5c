"""Which tensors share memory, by address: several storages may lie over one memory (`from_numpy` of one array)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from funcamp import _upstream
from funcamp._distributed.dtensor import local
from funcamp._memory import extent


def identity(leaf: Tensor) -> object:
    """What two names of one tensor share: the object, or address, shape, strides and type."""
    if not _has_memory(leaf):
        return id(leaf)
    return *_start(leaf), leaf.shape, leaf.stride(), leaf.dtype


def overlaps(named: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield every pair of names whose tensors have a byte in common, in their order. Reads no value."""
    names, leaves = list(named), list(named.values())
    spaces: dict[object, list[tuple[int, int, int]]] = {}
    for number, leaf in enumerate(leaves):
        if _has_memory(leaf):
            space, first = _start(leaf)
            spaces.setdefault(space, []).append((first, first + extent(local(leaf)), number))
    for spans in spaces.values():
        before: list[tuple[int, int, int]] = []
        for start, end, number in sorted(spans):
            before = [span for span in before if span[1] > start]
            for first, _, other in before:
                if _have_common_byte(leaves[other], leaves[number], start - first):
                    yield names[min(other, number)], names[max(other, number)]
            before.append((start, end, number))


def _has_memory(leaf: Tensor) -> bool:
    if _upstream.is_wrapped(leaf) or leaf.layout != torch.strided:
        return False
    return bool(leaf.numel())


def _start(leaf: Tensor) -> tuple[Any, int]:
    """The memory that a tensor lies in, and its first byte there."""
    leaf = local(leaf)
    storage, offset = leaf.untyped_storage(), int(leaf.storage_offset()) * leaf.itemsize
    # Without values (meta, fake) there is no address, and fake tensors warn when asked for it.
    address = 0 if storage.device.type == "meta" else storage.data_ptr()
    return (leaf.device, address + offset) if address else (storage._cdata, offset)


def _have_common_byte(first: Tensor, second: Tensor, distance: int) -> bool:
    """Whether two tensors share a byte, the second one beginning so many bytes after the first one."""
    marks = torch.zeros(max(extent(local(first)), distance + extent(local(second))), dtype=torch.bool, device="cpu")
    _bytes_of(local(first), marks, 0).fill_(True)
    return bool(_bytes_of(local(second), marks, distance).any())


def _bytes_of(leaf: Tensor, marks: Tensor, start: int) -> Tensor:
    strides = [stride * leaf.itemsize for stride in leaf.stride()]
    return marks.as_strided([*leaf.shape, leaf.itemsize], [*strides, 1], start)
