"""Whether this thread is compiling a step. torch.compiler.is_compiling tells models so, and in all threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


class _Thread(threading.local):
    tracing = False


_thread = _Thread()


def tracing() -> bool:
    """Return whether `trace` records what this thread does."""
    return not torch.compiler.is_dynamo_compiling() and _thread.tracing


def compiling() -> bool:
    """Return whether Dynamo or `trace` records what this thread does."""
    return torch.compiler.is_dynamo_compiling() or _thread.tracing


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Context manager: `trace` records."""
    before, _thread.tracing = _thread.tracing, True
    try:
        yield
    finally:
        _thread.tracing = before
