"""`compile_session`: all that is changed in this process while a step is traced and compiled."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator

import torch

from funcamp._jit.progress import Progress, progress_of
from funcamp._upstream.noise import without_noise

#: make_fx and Inductor's options are of the process, so one thread at a time compiles.
_lock = threading.Lock()
#: The number of new objects after which Python looks for garbage meanwhile.
_SELDOM = 100_000
#: Recursion limit for Inductor: planning memory recurses deeper with every buffer that is alive at the same time (at 48
#: blocks of a GPT beyond Python's default of 1,000).
_DEEP = 20_000


@contextlib.contextmanager
def compile_session(task: str) -> Iterator[Progress]:
    """Context manager around tracing and compiling one program.

    It takes turns with other threads, collects garbage rarely, leaves inference mode and reports progress.

    Args:
        task: what is compiled, for the report.
    """
    with torch.inference_mode(False), _lock, _few_collections(), without_noise(), progress_of(task) as progress:
        yield progress


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Context manager: collect garbage rarely, and among new objects only.

    A collection takes 0.2 s for torch's objects, and Inductor makes millions of objects that live long.
    """
    thresholds = gc.get_threshold()
    # If the process collects this rarely, the user has set up the collector. Asking whether objects were frozen takes
    # 0.1 s for a million of them, because Python counts them one by one.
    free = thresholds[0] < _SELDOM and gc.get_freeze_count() == 0
    if free:
        gc.freeze()
    gc.set_threshold(max(thresholds[0], _SELDOM) if thresholds[0] else 0, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if free:
            gc.unfreeze()


@contextlib.contextmanager
def deep_recursion() -> Iterator[None]:
    """Context manager: Inductor may recurse deep. Not while a step is traced: its own recursion must still end."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _DEEP))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
