"""What a script saves to a file or loads from one: optimizers, and Python numbers that may be a scale."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from torch.optim import Optimizer

#: Dicts and lists are searched to this depth.
_DEPTH = 4
_LONGEST_TEXT = 10_000
#: Numbers that are as large as a scale: of at most 40 digits, for a float of all.
_NUMBERS = re.compile(r"\b\d{1,40}(?:\.\d{1,20})?\b")


def contains_optimizer(obj: object, depth: int = _DEPTH) -> bool:
    """Return whether an object contains an optimizer, or the state of one."""
    if isinstance(obj, Optimizer):
        return True
    if not depth:
        return False
    if dataclasses.is_dataclass(obj):
        obj = vars(obj)
    if not isinstance(obj, (dict, list, tuple)):
        return False
    if isinstance(obj, dict) and {"state", "param_groups"} <= obj.keys():
        return True
    parts = obj.values() if isinstance(obj, dict) else obj
    return any(contains_optimizer(part, depth - 1) for part in parts)


def numbers_in(obj: object, depth: int = _DEPTH) -> Iterator[float]:
    """Yield the Python numbers in an object, also those in short texts such as JSON."""
    if isinstance(obj, (int, float)) and not isinstance(obj, bool):
        yield float(obj)
    elif isinstance(obj, str) and len(obj) <= _LONGEST_TEXT:
        yield from map(float, _NUMBERS.findall(obj))
    elif depth and isinstance(obj, (dict, list, tuple)):
        for part in obj.values() if isinstance(obj, dict) else obj:
            yield from numbers_in(part, depth - 1)
