"""A buffer pool for compiled CPU programs.

Inductor plans the buffers of a program into one arena. glibc returns a block above 32 MB to the system when it is
freed, and the next call faults its pages in again, one by one, which takes up to a third of a step. A program that may
use that much memory at once is called from Python instead and takes its buffers from this pool. The pool does not
raise the peak of a step; between two steps it keeps its memory.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from funcamp import _tree, _upstream

#: The largest threshold that glibc sets itself (DEFAULT_MMAP_THRESHOLD_MAX in malloc.c, 64 bit).
_MAPPED = 32 << 20
LARGE = _MAPPED
#: Peak of a traced program over the compiled one's arena: 1.6 to 2.5 on a GPT, a ViT, a ConvNeXt and a ResNet.
_FUSED = 2
#: The smallest buffer to keep: smaller ones are not worth the lookup.
KEPT = 1 << 20
_threads = threading.local()
_allocate: Any = _upstream.find("torch._C._dynamo.guards._empty_strided_cpu")
_holders: Any = _upstream.find("torch._C._storage_Use_Count")


class _Block:
    """A tensor, and the reference counts of its storage, in C++ and in Python, when it has no other user."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._storage = tensor, tensor.untyped_storage()
        self._alone = self._holders()

    def _holders(self) -> tuple[int, int, int]:
        storage = self._storage  # with its size, because a former user may have resized it
        return _holders(storage._cdata), sys.getrefcount(storage), storage.nbytes()

    def is_free(self) -> bool:
        return self._holders() == self._alone


class Scratch:
    """The buffers of one compiled step: each is reused once nothing refers to its storage."""

    def __init__(self) -> None:
        self._kept: dict[Any, list[_Block]] = {}

    def take(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor without defined values."""
        kept = self._kept.setdefault((size, stride, dtype), [])
        block = next((block for block in kept if block.is_free()), None)
        if block is None:
            block = _Block(_allocate(size, stride, dtype))
            kept.append(block)
        return block.tensor.detach()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Context manager: this thread's programs take their large buffers from here."""
        before = getattr(_threads, "scratch", None)
        _threads.scratch = self
        try:
            yield
        finally:
            _threads.scratch = before


def keep_heap() -> None:
    """Make glibc keep the memory that torch operations free (outputs of convolutions, oneDNN's scratch).

    It keeps up to twice the largest mapped block that was ever freed. This block's memory is never touched.
    """
    torch.empty(_MAPPED - (1 << 16), dtype=torch.uint8)


def wanted(module: fx.GraphModule, written: int) -> bool:
    """Return whether a traced program may use so much memory at once that glibc would not keep it.

    Args:
        module: the program.
        written: bytes of results that a compiled program writes directly to their destination.
    """
    return _upstream.usable(_allocate, _holders) and peak(module) - written >= _FUSED * LARGE


def peak(module: fx.GraphModule) -> int:
    """Return the peak bytes of a program that frees each result after its last use, without its arguments."""
    held = {node: _storages(node) for node in module.graph.nodes}
    last: dict[int, fx.Node] = {}
    sizes: dict[int, int] = {}
    for node in held:
        for other in [*node.all_input_nodes, node]:
            for key, size in held[other]:
                last[key], sizes[key] = node, size
    for node in module.graph.find_nodes(op="placeholder"):
        sizes |= {key: 0 for key, _ in held[node]}
    ends: dict[fx.Node, int] = {}
    for key, node in last.items():
        ends[node] = ends.get(node, 0) + sizes[key]
    most = now = 0
    begun: set[int] = set()
    for node in held:
        for key, _ in held[node]:
            now += sizes[key] * (key not in begun)
            begun.add(key)
        most = max(most, now)
        now -= ends.get(node, 0)
    return most


def _storages(node: fx.Node) -> list[tuple[int, int]]:
    values = [value for value in _tree.leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    storages = [value.untyped_storage() for value in values if value.layout == torch.strided]
    return [(storage._cdata, storage.nbytes()) for storage in storages]


def asked() -> contextlib.AbstractContextManager[Any]:
    """Return a context manager: Inductor compiles programs that take their buffers from this pool."""
    return mock.patch("torch._C._dynamo.guards._empty_strided_cpu", _empty_strided)


def _empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    scratch: Scratch | None = getattr(_threads, "scratch", None)
    if scratch is not None and math.prod(size) * dtype.itemsize >= KEPT:
        return scratch.take(size, stride, dtype)
    made: Tensor = _allocate(size, stride, dtype)
    return made
