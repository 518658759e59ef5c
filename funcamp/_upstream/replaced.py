"""Replace attributes of torch's modules and classes for a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_ABSENT = object()


@contextlib.contextmanager
def replaced(owner: object, **values: object) -> Iterator[None]:
    """Context manager: attributes of an object have these values, and afterwards the former ones.

    An attribute that the object only inherits is its own meanwhile, and inherited again afterwards.
    """
    before = {name: vars(owner).get(name, _ABSENT) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
