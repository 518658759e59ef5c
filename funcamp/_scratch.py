"""Large buffers of compiled programs on a CPU, kept from one call to the next.

glibc gives every block above 32 MB back to the system when it is freed, and the next call faults its pages in again,
one by one: a flat gradient of 38 M parameters is such a block, and that takes a fifth of the step. Keeping it adds
nothing to the peak of a step, and its own size between two.
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
from torch import Tensor

from funcamp import _upstream

#: glibc's largest threshold by itself (DEFAULT_MMAP_THRESHOLD_MAX in malloc.c, 64 bit).
LARGE = 32 << 20
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
    """The large buffers of one compiled step: each is used again once nothing holds its storage any more."""

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


def wanted(args: list[Tensor]) -> bool:
    """Whether a program of these arguments may have large buffers."""
    return _upstream.usable(_allocate, _holders) and any(
        arg.nbytes >= LARGE for arg in args if arg.device.type == "cpu"
    )


@contextlib.contextmanager
def asked() -> Iterator[None]:
    """A region in which Inductor compiles programs that ask for their buffers here."""
    with mock.patch("torch._C._dynamo.guards._empty_strided_cpu", _empty_strided):
        yield


def _empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    scratch: Scratch | None = getattr(_threads, "scratch", None)
    if scratch is not None and math.prod(size) * dtype.itemsize >= LARGE:
        return scratch.take(size, stride, dtype)
    made: Tensor = _allocate(size, stride, dtype)
    return made
