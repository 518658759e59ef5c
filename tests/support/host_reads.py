"""What reads a tensor's values on the host, and the line that does."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def _place() -> str:
    """The innermost line that is neither torch's nor this file's first part."""
    frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.name not in _OWN]
    return f"{frames[-1].filename}:{frames[-1].lineno}"


_OWN = ("_place", "__torch_dispatch__", "__torch_function__")


class _Dispatched(TorchDispatchMode):
    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        if name in ("aten._local_scalar_dense", "aten.equal", "aten.nonzero", "aten.masked_select"):
            self.reads.append(f"{name} at {_place()}")
        return func(*args, **(kwargs or {}))


class _Called(TorchFunctionMode):
    """What copies a CPU tensor's values out below the dispatcher."""

    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            self.reads.append(f"{func.__name__} at {_place()}")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def host_reads() -> Iterator[list[str]]:
    """Lists what reads a tensor's values on the host inside the block, with the line that did."""
    reads: list[str] = []
    with _Called(reads), _Dispatched(reads):
        yield reads
