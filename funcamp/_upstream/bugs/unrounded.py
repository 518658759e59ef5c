"""Inductor reads a rounded value back unrounded, even with emulate_precision_casts (torch 2.11 and 2.12)."""

from __future__ import annotations

from contextlib import AbstractContextManager

from funcamp import _upstream
from funcamp._upstream.bugs.bug import Bug
from funcamp._upstream.replaced import replaced


def _changed() -> AbstractContextManager[None]:
    from torch._inductor.codegen.cpp import CppKernel

    def forget_the_value_before_rounding(*_: object) -> None:
        pass

    return replaced(CppKernel, cache_dtype_convert=forget_the_value_before_rounding)


BUG = Bug(
    "unrounded",
    "Inductor reads a rounded value back unrounded, even with emulate_precision_casts",
    "https://github.com/pytorch/pytorch/issues/185337",
    _upstream.UNROUNDED,
    _changed,
)
