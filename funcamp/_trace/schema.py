"""The arguments of an operation that, by its schema, share memory with its results or are written."""

from __future__ import annotations

from typing import Any

from funcamp import _tree


def aliased(func: Any, args: Any, kwargs: Any, *, written: bool = False) -> list[Any]:
    """Return the leaves of such arguments; with `written` only of those that it writes."""
    schema = getattr(func, "_schema", None)
    found: list[Any] = []
    for index, argument in enumerate(() if schema is None else schema.arguments):
        if argument.alias_info is not None and (argument.alias_info.is_write or not written):
            found += _tree.leaves(args[index] if index < len(args) else kwargs.get(argument.name))
    return found
