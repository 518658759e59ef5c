"""Make Inductor's queries to the C++ compiler ahead of time, in a thread.

Inductor tests which vector instructions work, with a small program for each (8 s on two cores, 1 s to load them again),
and precompiles the headers of all programs (6 s each, once per machine; 1 s to check that they are current). It does so
in the middle of its work; a thread does it here while the step is traced, into the same caches.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import queue
import threading
from types import TracebackType

from funcamp import _upstream


class Ahead:
    """Context manager: a thread makes the queries; exit waits for it. Inductor repeats failed ones."""

    def __init__(self) -> None:
        import torch._inductor.compile_fx  # noqa: F401  import all of it now: two threads must not import one package

        self._instructions = _upstream.find("torch._inductor.cpu_vec_isa.pick_vec_isa")
        self._cpp = _upstream.find("torch._inductor.codecache.CppWrapperCodeCache")
        self._python = _upstream.find("torch._inductor.codecache.CppPythonBindingsCodeCache")
        self._asked: queue.SimpleQueue[contextvars.Context | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._ask, name="funcamp-ahead", daemon=True)

    def __enter__(self) -> Ahead:
        """Request the vector instructions."""
        self._thread.start()
        return self

    def headers(self) -> None:
        """Request the headers of a program that is compiled with Inductor's current options."""
        self._asked.put(contextvars.copy_context())  # Inductor's options are per context; before torch 2.12 per process

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Wait for the thread."""
        self._asked.put(None)
        self._thread.join()

    def _ask(self) -> None:
        with contextlib.suppress(Exception):  # Inductor hits the same error and raises it
            self._instructions()
            if context := self._asked.get():
                context.run(self._ask_for_headers)

    def _ask_for_headers(self) -> None:
        from torch._inductor import config

        # Compiles the headers at once, and code only when its result is called.
        load = (self._cpp if config.cpp_wrapper else self._python).load_async
        apart = config.cpp_wrapper and config.cpp_wrapper_build_separate
        if apart and "needs_vec_isa" in inspect.signature(load).parameters:  # 2.12 or later
            load = functools.partial(load, needs_vec_isa=False, kernel_needs_vec_isa=True)
        load("", "cpu", optimized_code=" " if apart else None)
