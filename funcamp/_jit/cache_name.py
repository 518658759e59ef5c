"""What a program depends on besides its graph and Inductor's options, as a name in Inductor's cache."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from funcamp._jit.passes.program import Steps

_PACKAGE = Path(__file__).parents[1]


def cache_name(*, exact: bool, without: frozenset[str], steps: Steps | None) -> bytes:
    """Return the name: another one after a change of any file of this package, such as one with a formula or a pass.

    Args:
        exact: part of the name, because Inductor does not see what exact=True corrects.
        without: the names of what is left out, for the same reason.
        steps: those of a call, for the same reason.
    """
    return repr(("funcamp", _sources(), exact, sorted(without), steps)).encode()


@functools.cache
def _sources() -> str:
    files = sorted(_PACKAGE.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
