"""Make Inductor's queries to the C++ compiler ahead of time, in a thread.

Inductor tests which vector instructions work, with a small program for each (8 s on two cores, 1 s to load them again),
and precompiles the headers of all programs (6 s each, once per machine; 1 s to check that they are current). It does so
in the middle of its work; a thread does it here at its beginning, into the same caches.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from funcamp import _upstream
from funcamp._jit.passes.program import Pass


@contextlib.contextmanager
def ahead() -> Iterator[None]:
    """Context manager: a thread queries the compiler with Inductor's current options; exit waits for it."""
    import torch._inductor.compile_fx  # noqa: F401  import all of it now: two threads must not import one package

    cpp = _upstream.find("torch._inductor.codecache.CppWrapperCodeCache")
    python = _upstream.find("torch._inductor.codecache.CppPythonBindingsCodeCache")
    with ThreadPoolExecutor(1, "funcamp-ahead") as thread:  # raises none of its errors: Inductor hits the same
        # Inductor's options are per context; before torch 2.12 per process.
        context = contextvars.copy_context()
        thread.submit(_upstream.find("torch._inductor.cpu_vec_isa.pick_vec_isa"))
        thread.submit(context.run, _query_headers, cpp, python)
        yield


def _query_headers(cpp: Any, python: Any) -> None:
    from torch._inductor import config

    # Compiles the headers at once, and code only when its result is called.
    load = (cpp if config.cpp_wrapper else python).load_async
    apart = config.cpp_wrapper and config.cpp_wrapper_build_separate
    if apart and "needs_vec_isa" in inspect.signature(load).parameters:  # 2.12 or later
        load = functools.partial(load, needs_vec_isa=False, kernel_needs_vec_isa=True)
    load("", "cpu", optimized_code=" " if apart else None)


PASS = Pass(
    name="headers",
    why="a thread queries the C++ compiler while Inductor works: GPT-2's first call took 50 s instead of 31",
    evidence="benchmarks/README.md",
    where=lambda target: target.by_inductor and target.on_cpu,
    run=lambda program: program._replace(while_compiled=(*program.while_compiled, ahead)),
)
