"""Checks that many calls make of an argument; each returns the value, or names the call, the argument and the rule."""

from __future__ import annotations

import math
import numbers

from funcamp import _tree


def boolean(call: str, name: str, value: object) -> bool:
    """Return a bool.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{call}: {name} must be True or False; got {_tree.brief(value)}")
    return value


def integer(call: str, name: str, value: object, least: int, most: int | None = None, kind: str = "an integer") -> int:
    """Return an integer from least to most.

    Raises:
        TypeError: it is none.
        ValueError: it is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{call}: {name} must be {kind}; got {_tree.brief(value)}")
    number = int(value)
    if number < least or (most is not None and number > most):
        raise ValueError(f"{call}: {name} must be {least} {'or more' if most is None else f'to {most}'}; got {number}")
    return number


def real(call: str, name: str, value: object, kind: str = "a Python number") -> float:
    """Return a Python number as a float; infinity for an integer beyond float64.

    Raises:
        TypeError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{call}: {name} must be {kind}; got {_tree.brief(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]  # every Real compares
