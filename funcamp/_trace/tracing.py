"""The trace that runs in this thread."""

from __future__ import annotations

import threading

import torch


class HostError(Exception):
    """The function does on the host what a program cannot: it reads a value, draws, seeds, or keeps state in Python.

    The text goes on from "jit: step must ", which `trace_step` puts before it.
    """


class _Current(threading.local):
    recorder: object = None


current = _Current()
"""The trace of this thread."""


def running() -> object:
    """Return the trace of this thread; None if there is none, or if Dynamo compiles."""
    return None if torch.compiler.is_dynamo_compiling() else current.recorder


def compiling() -> bool:
    """Return whether Dynamo or a trace of this thread records what is called.

    torch.compiler.is_compiling() does not say so: it is False in parts of a trace (`as_compiled.py`), and True in all
    threads in the others.
    """
    return torch.compiler.is_dynamo_compiling() or current.recorder is not None
