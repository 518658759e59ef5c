"""Argument checks, which return the value or raise with the call, the argument and the rule; immutable objects."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator

from torch.utils.data import DataLoader, Dataset

from funcamp import _tree


def boolean(call: str, name: str, value: object) -> bool:
    """Return value if it is a bool.

    Raises:
        TypeError: value is not a bool.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{call}: {name} must be True or False; got {_tree.brief(value)}")
    return value


def integer(call: str, name: str, value: object, least: int, most: int | None = None, kind: str = "an integer") -> int:
    """Return value as an int from least to most.

    Raises:
        TypeError: value is not an integer.
        ValueError: value is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{call}: {name} must be {kind}; got {_tree.brief(value)}")
    number = int(value)
    if number < least or (most is not None and number > most):
        rule = f"{least} or more" if most is None else f"{least} to {most}"
        raise ValueError(f"{call}: {name} must be {rule}; got {number}")
    return number


def real(call: str, name: str, value: object, kind: str = "a Python number") -> float:
    """Return value as a float; infinity for an integer beyond float64.

    Raises:
        TypeError: value is not a Python number.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{call}: {name} must be {kind}; got {_tree.brief(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]  # every Real compares


def one_batch(call: str, batch: object) -> None:
    """Raise TypeError if a call got what batches are taken from."""
    if isinstance(batch, (DataLoader, Dataset, Iterator)):
        raise TypeError(
            f"{call}: batch must be one batch; got a {type(batch).__name__} of them: write for batch in loader"
        )


class Fixed:
    """Base of objects that are values: public attributes, which the class annotates, are set once, in the constructor.

    Assigning one later would be without effect on programs that were traced.
    """

    _instead = "make another object"
    """The end of the error's text."""

    def __setattr__(self, name: str, value: object) -> None:
        is_known = any(name in vars(base).get("__annotations__", ()) for base in type(self).__mro__)
        is_set = name in vars(self)
        if not name.startswith("_") and (is_set or not is_known):
            raise AttributeError(
                f"{self!r}: {name} cannot be assigned, because it is a value; got {_tree.brief(value)}. "
                + self._instead.format(name=name, value=value)
            )
        object.__setattr__(self, name, value)
