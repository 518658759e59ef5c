"""What is changed in this process while a step is traced and compiled."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from funcamp._jit.progress import reported
from funcamp._upstream.noise import without_noise

#: make_fx and Inductor's options are of the process, so one thread at a time compiles.
_lock = threading.Lock()
#: Recursion limit for Inductor: planning memory recurses deeper with every buffer that is alive at the same time (at 48
#: blocks of a GPT beyond Python's default of 1,000).
_DEEP = 20_000

_Result = TypeVar("_Result")


@contextlib.contextmanager
def compile_session(task: str) -> Iterator[None]:
    """Context manager around tracing and compiling one program.

    It takes turns with other threads, leaves inference mode, and reports that it takes long.

    Args:
        task: what is compiled, for the report.
    """
    with torch.inference_mode(False), _lock, without_noise(), reported(task):
        yield


@contextlib.contextmanager
def deep_recursion() -> Iterator[None]:
    """Context manager: Inductor may recurse deep. Not while a step is traced: its own recursion must still end."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _DEEP))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def with_large_stack(function: Callable[[], _Result]) -> _Result:
    """Call a function with memory for 300,000 values of Python's stack; return its result.

    Python gets memory for 2,000 at a time, and gives it back when the function that needed it returns. A loop that
    calls functions at such an edge does that at each call. On average over the depths of a caller tracing took 1.2 and
    compiling 1.3 times as long, up to 1.6 times (benchmarks/python_stack.py).
    """
    return function()


with_large_stack.__code__ = with_large_stack.__code__.replace(co_stacksize=300_000)
