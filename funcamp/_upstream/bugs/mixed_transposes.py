"""GCC 12 compiles torch's transposition of 16-bit tiles wrong for Intel's Sapphire Rapids, if a file uses it twice.

A kernel that transposes float16 or bfloat16 tensors, such as attention's keys, then reads memory that nothing has
written: NaN, or other numbers. The fault is in what GCC makes of straight code (`-ftree-slp-vectorize`, part of -O3);
Inductor writes vectors itself and already leaves out GCC's own for loops.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from funcamp import _upstream
from funcamp._upstream.bugs.bug import Bug
from funcamp._upstream.replaced import replaced


def _changed() -> AbstractContextManager[None]:
    from torch._inductor import cpp_builder

    builder: Any = cpp_builder
    flags_of_torch = builder._get_optimization_cflags

    def with_a_flag(cpp_compiler: str, *args: object, **kwargs: object) -> tuple[list[str], list[str]]:
        compiler_flags, linker_flags = flags_of_torch(cpp_compiler, *args, **kwargs)
        if builder._is_gcc(cpp_compiler):
            compiler_flags = [*compiler_flags, "fno-tree-slp-vectorize"]
        return compiler_flags, linker_flags

    return replaced(builder, _get_optimization_cflags=with_a_flag)


BUG = Bug(
    "mixed_transposes",
    "GCC 12 compiles torch's transposition of 16-bit tiles wrong for Intel's Sapphire Rapids",
    "tests/jit/test_transposes.py",
    _upstream.MIXED_TRANSPOSES,
    _changed,
)
