"""Change the C++ that Inductor has written for a program, before it is compiled."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from funcamp import _upstream
from funcamp._upstream.replaced import replaced


@functools.cache
def _writer() -> tuple[Any, Callable[..., None]] | None:
    """Return the class that writes the C++, and its function for the end; None if this torch has others."""
    end = _upstream.find("torch._inductor.codegen.cpp_wrapper_cpu.CppWrapperCpu.generate_end")
    return (sys.modules[end.__module__].CppWrapperCpu, end) if _upstream.usable(end) else None


@contextlib.contextmanager
def sources_changed(changes: tuple[Callable[[str], str], ...]) -> Iterator[None]:
    """Context manager: the C++ that calls the kernels of a program is the result of these functions, one by one."""
    found = _writer() if changes else None
    if found is None:
        yield
        return
    writer, end = found

    def generate_end(self: Any, result: Any) -> None:
        """Change what is written so far: all but the kernels."""
        before = source = result.getvalue()
        for change in changes:
            source = change(source)
        if source is not before:
            result.clear()
            result.splice(source)
        end(self, result)

    with replaced(writer, generate_end=generate_end):
        yield
