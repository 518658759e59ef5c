"""Replace attributes of torch's modules and classes for a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_ABSENT = object()


def with_subclasses(base: type) -> list[type]:
    """Return a class and all its subclasses, each once: a method is replaced in all that override it."""
    classes = [base]
    for known_class in classes:
        subclasses: list[type] = known_class.__subclasses__()
        classes += [subclass for subclass in subclasses if subclass not in classes]
    return classes


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
