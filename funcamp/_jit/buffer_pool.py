"""Memory of compiled programs on a CPU, kept from one call to the next.

Inductor plans the buffers of a program into one arena. glibc gives a block above 32 MB back to the system when it is
freed, and the next call faults its pages in again, one by one, which takes up to a third of a step. Where a program
may hold as much at once it is called from Python, and asks for its memory here. That adds nothing to the peak of a
step, and its own size between two.
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

#: glibc's largest threshold by itself (DEFAULT_MMAP_THRESHOLD_MAX in malloc.c, 64 bit).
_MAPPED = 32 << 20
LARGE = _MAPPED
#: What a traced program holds, over the arena of the compiled one: 1.6 to 2.5 on a GPT, a ViT, a ConvNeXt and a ResNet.
_FUSED = 2
#: What a program that has such blocks keeps: less than this is not worth the look.
KEPT = 1 << 20
_threads = threading.local()
_allocate: Any = _upstream.find("torch._C._dynamo.guards._empty_strided_cpu")
_holders: Any = _upstream.find("torch._C._storage_Use_Count")


class _Block:
    """A tensor, and how many hold its storage, in C++ and in Python, when nobody else does."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._storage = tensor, tensor.untyped_storage()
        self._alone = self._holders()

    def _holders(self) -> tuple[int, int, int]:
        storage = self._storage  # its size too: whoever held it may have resized it
        return _holders(storage._cdata), sys.getrefcount(storage), storage.nbytes()

    def is_free(self) -> bool:
        return self._holders() == self._alone


class Scratch:
    """The buffers of one compiled step: each is used again once nothing holds its storage any more."""

    def __init__(self) -> None:
        self._kept: dict[Any, list[_Block]] = {}
        self._lock = threading.Lock()

    def take(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor without values."""
        with self._lock:
            kept = self._kept.setdefault((size, stride, dtype), [])
            block = next((block for block in kept if block.is_free()), None)
            if block is None:
                block = _Block(_allocate(size, stride, dtype))
                kept.append(block)
            return block.tensor.detach()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """A region in which this thread's programs take their large buffers from here."""
        before = getattr(_threads, "scratch", None)
        _threads.scratch = self
        try:
            yield
        finally:
            _threads.scratch = before


def keep_heap() -> None:
    """Let glibc keep what operations of torch free (outputs of convolutions, oneDNN's scratch) from here on.

    It keeps up to twice the largest mapped block that was ever freed. The memory of this one is never touched.
    """
    torch.empty(_MAPPED - (1 << 16), dtype=torch.uint8)


def wanted(module: fx.GraphModule, written: int) -> bool:
    """Whether a traced program may hold so much at once that glibc would not keep it.

    Args:
        module: the program.
        written: bytes of its results that a compiled one writes to their places at once.
    """
    return _upstream.usable(_allocate, _holders) and peak(module) - written >= _FUSED * LARGE


def peak(module: fx.GraphModule) -> int:
    """The most bytes that a program holds at once if each result is freed after its last use, arguments apart."""
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


@contextlib.contextmanager
def asked() -> Iterator[None]:
    """A region in which Inductor compiles programs that ask for their buffers here."""
    with mock.patch("torch._C._dynamo.guards._empty_strided_cpu", _empty_strided):
        yield


def _empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    scratch: Scratch | None = getattr(_threads, "scratch", None)
    if scratch is not None and math.prod(size) * dtype.itemsize >= KEPT:
        return scratch.take(size, stride, dtype)
    made: Tensor = _allocate(size, stride, dtype)
    return made
