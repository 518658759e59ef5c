"""Room for Python's frames while torch compiles.

CPython 3.11 and later keeps frames in chunks of 16 KiB, and gives a chunk back as soon as it is empty. A loop whose
calls begin a chunk maps and unmaps memory at every call, which makes the call 200 times slower. Where chunks begin
depends on the caller's depth: a compilation took between 4 % and a fifth longer. A frame that needs more than 16 KiB
gets a chunk that is a power of two: the rest of it holds what this frame calls.
https://github.com/python/cpython/issues/142183, present in all releases of 3.11 and 3.12.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

#: Values that the frame asks for: 4 MiB and a little, so of a chunk of 8 MiB half is left. No memory is touched.
_VALUES = 2**19


def with_room(fn: Callable[[], _T]) -> _T:
    """Return the result of a function whose frames, up to some 10,000, are in one chunk of memory."""
    return fn()


with_room.__code__ = with_room.__code__.replace(co_stacksize=_VALUES)
