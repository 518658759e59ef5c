"""Parts of an optimizer's class that `torch.compile` made, as they were before.

A step is traced as one program; a part that is compiled separately would not be in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def uncompiled(function: object) -> Callable[..., Any] | None:
    """Return what `torch.compile` was given; None for what it has not made."""
    inner: Callable[..., Any] | None = getattr(function, "_torchdynamo_orig_callable", None)
    return None if inner is None else uncompiled(inner) or inner


@functools.cache
def compiled_members(cls: type) -> dict[str, Any]:
    """Return the methods of a class that are compiled, as they were before, by name."""
    members: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            members.pop(name, None)
            function = uncompiled(getattr(member, "__func__", member))
            if function is not None:
                members[name] = type(member)(function) if isinstance(member, (staticmethod, classmethod)) else function
    return members
