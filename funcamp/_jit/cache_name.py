"""What a program depends on besides its graph and Inductor's options, as a name in Inductor's cache."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def cache_name(*, exact: bool) -> bytes:
    """Return the name: another one after a change of any file with formulas, passes or patches of Inductor.

    Args:
        exact: part of the name, because Inductor does not see what exact=True patches.
    """
    return b"funcamp-" + _sources() + b"-exact" * exact


@functools.cache
def _sources() -> bytes:
    files = sorted(file for folder in ("_jit", "_upstream", "_trace") for file in (_PACKAGE / folder).glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest().encode()
