"""What a script saves to a file: whether an optimizer, or a number, is in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch.optim import Optimizer

#: Dicts and lists are searched to this depth.
_DEPTH = 4


def parts_of(obj: object, depth: int = _DEPTH) -> Iterator[object]:
    """Yield an object and what it contains: the values of dicts, lists and dataclasses."""
    yield obj
    if dataclasses.is_dataclass(obj):
        obj = vars(obj)
    if depth and isinstance(obj, (dict, list, tuple)):
        for part in obj.values() if isinstance(obj, dict) else obj:
            yield from parts_of(part, depth - 1)


def is_optimizer(part: object) -> bool:
    """Return whether a part is an optimizer, or the state of one."""
    return isinstance(part, Optimizer) or (isinstance(part, dict) and {"state", "param_groups"} <= part.keys())
