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


def reads_no_value(name: str) -> bool:
    """Return whether an operation takes only shape, dtype and device of a tensor (new_zeros, zeros_like)."""
    name = name.removeprefix("aten::")
    return name.startswith("new_") or name.endswith("_like") or name in ("sym_size", "sym_stride", "is_same_size")
