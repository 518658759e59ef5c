"""C++ that Inductor generates ignores errors of `index_put` and `scatter_reduce` (torch 2.11 to 2.13).

A write to indices out of range would silently leave the tensor as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from funcamp import _upstream
from funcamp._upstream.bugs.bug import Bug
from funcamp._upstream.replaced import replaced


def _checked(generate: Callable[..., None]) -> Callable[..., None]:
    """Return a function that generates the same calls, each in torch's check of its error code."""

    def generate_checked(self: Any, *args: object) -> None:
        write_line = self.writeline

        def write_checked_line(text: object) -> None:
            if isinstance(text, str) and text.startswith("aoti_torch_"):  # a call, which returns an error code
                text = f"AOTI_TORCH_ERROR_CODE_CHECK({text.rstrip(';')});"
            write_line(text)

        with replaced(self, writeline=write_checked_line):
            generate(self, *args)

    return generate_checked


@contextlib.contextmanager
def _changed() -> Iterator[None]:
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    names = ("_generate_index_put_fallback", "_generate_scatter_fallback")
    checked = {name: _checked(getattr(CppWrapperCpu, name)) for name in names}
    with replaced(CppWrapperCpu, **checked):
        yield


BUG = Bug(
    "lost_errors",
    "C++ that Inductor generates ignores errors of index_put and scatter_reduce",
    "https://github.com/pytorch/pytorch/pull/190909",
    _upstream.LOST_ERRORS,
    _changed,
)
