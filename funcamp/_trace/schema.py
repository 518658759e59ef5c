"""The arguments of an operation that, by its schema, share memory with its results or are written."""

from __future__ import annotations

from funcamp import _tree
from funcamp._types import Args, Kwargs


def aliased(func: object, args: Args, kwargs: Kwargs, *, written: bool = False) -> list[object]:
    """Return the leaves of such arguments; with `written` only of those that it writes.

    Args:
        func: an operation; one without a schema has no such arguments.
        args: the arguments.
        kwargs: those that are passed by name.
        written: whether to return only those that the operation writes.
    """
    schema = getattr(func, "_schema", None)
    if schema is None:
        return []
    leaves: list[object] = []
    for index, argument in enumerate(schema.arguments):
        alias_info = argument.alias_info
        if alias_info is None or (written and not alias_info.is_write):
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        leaves += _tree.leaves(value)
    return leaves


def reads_no_value(func: object) -> bool:
    """Return whether an operation takes only shape, dtype and device of a tensor (new_zeros, zeros_like)."""
    schema = getattr(func, "_schema", None)
    name = "" if schema is None else schema.name.split("::")[-1]
    return name.startswith("new_") or name.endswith("_like") or name in ("sym_size", "sym_stride", "is_same_size")
