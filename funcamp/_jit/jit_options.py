"""`JitOptions`: the arguments of `jit`."""

from __future__ import annotations

from typing import NamedTuple


class JitOptions(NamedTuple):
    """The arguments of `jit`, checked."""

    donate: bool
    capture: bool
    unroll: int | None
    exact: bool
    backend: str
    compile_after: int
    max_signatures: int
    without: frozenset[str]
    explain: bool
