"""Change the C++ that Inductor has written for a program, before it is compiled."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from funcamp import _upstream
from funcamp._upstream.replaced import replaced

#: The function of a program that Python calls.
ENTRY = "void inductor_entry_impl("
#: Where it takes over its inputs; their number includes Inductor's own constants.
TAKE_OVER = re.compile(r"auto inputs = steal_from_raw_handles_to_raii_handles\(input_handles, (\d+)\);")


@functools.cache
def _writer() -> tuple[Any, Callable[..., None]] | None:
    """Return the class that writes the C++, and its function for the end; None if this torch has others."""
    generate_end = _upstream.find("torch._inductor.codegen.cpp_wrapper_cpu.CppWrapperCpu.generate_end")
    if not _upstream.usable(generate_end):
        return None
    return sys.modules[generate_end.__module__].CppWrapperCpu, generate_end


def can_change_sources() -> bool:
    """Return whether this torch writes its C++ where it can be changed."""
    return _writer() is not None


@contextlib.contextmanager
def sources_changed(changes: tuple[Callable[[str], str], ...]) -> Iterator[None]:
    """Context manager: the C++ that calls the kernels of a program is the result of these functions, one by one."""
    writer_and_end = _writer() if changes else None
    if writer_and_end is None:
        yield
        return
    writer, generate_own_end = writer_and_end

    def generate_end(self: Any, result: Any) -> None:
        """Change what is written so far: all but the kernels."""
        written_source = result.getvalue()
        source = written_source
        for change in changes:
            source = change(source)
        if source is not written_source:
            result.clear()
            result.splice(source)
        generate_own_end(self, result)

    with replaced(writer, generate_end=generate_end):
        yield
