"""What a script saves to a file or loads from one: optimizers, and Python numbers that may be a scale."""

from __future__ import annotations

from collections.abc import Iterator

from torch.optim import Optimizer

#: Dicts and lists are searched to this depth.
_DEPTH = 4


def contains_optimizer(obj: object, depth: int = _DEPTH) -> bool:
    """Return whether an object contains an optimizer, or the state of one."""
    if isinstance(obj, Optimizer):
        return True
    if not depth or not isinstance(obj, (dict, list, tuple)):
        return False
    if isinstance(obj, dict) and {"state", "param_groups"} <= obj.keys():
        return True
    parts = obj.values() if isinstance(obj, dict) else obj
    return any(contains_optimizer(part, depth - 1) for part in parts)


def numbers_in(obj: object, depth: int = _DEPTH) -> Iterator[float]:
    """Yield the Python floats in an object."""
    if isinstance(obj, float):
        yield obj
    elif depth and isinstance(obj, (dict, list, tuple)):
        for part in obj.values() if isinstance(obj, dict) else obj:
            yield from numbers_in(part, depth - 1)
