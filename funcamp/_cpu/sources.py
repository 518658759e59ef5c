"""Change the C++ that Inductor has written for a program, before it is compiled."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from funcamp import _upstream

#: The function of a program that Python calls.
ENTRY = "void inductor_entry_impl("
#: Where it takes over its inputs; their number includes Inductor's own constants.
TAKE_OVER = re.compile(r"auto inputs = steal_from_raw_handles_to_raii_handles\(input_handles, (\d+)\);")


def _generate_end() -> Any:
    """Return the function with which Inductor ends the C++ of a program."""
    return _upstream.find("torch._inductor.codegen.cpp_wrapper_cpu.CppWrapperCpu.generate_end")


def can_change_sources() -> bool:
    """Return whether this torch writes its C++ where it can be changed."""
    return _upstream.usable(_generate_end())


@contextlib.contextmanager
def source_changed(change: Callable[[str], str]) -> Iterator[None]:
    """Context manager: the C++ that calls the kernels of a program is the result of a function.

    Of several, the one that was entered last changes it first.
    """
    if not can_change_sources():
        yield
        return
    writer: Any = sys.modules[_generate_end().__module__].CppWrapperCpu
    former_end = writer.generate_end

    def generate_end(self: Any, result: Any) -> None:
        """Change what is written so far: all but the kernels."""
        source = result.getvalue()
        changed_source = change(source)
        if changed_source != source:
            result.clear()
            result.splice(changed_source)
        former_end(self, result)

    with patch.object(writer, "generate_end", generate_end):
        yield
