"""Operations of torch under a name of this library, so that no compiler decomposes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch._ops import OpOverload

#: All of this library's operations; it must live as long as they are called.
_library: Any = torch.library.Library("funcamp", "FRAGMENT")  # type: ignore[no-untyped-call]


def renamed(
    name: str,
    original: OpOverload,
    run: Callable[..., object],
) -> OpOverload:
    """Define an operation with the arguments of another one under another name, and return it.

    Args:
        name: the name after "funcamp::".
        original: the operation whose signature it has.
        run: what it computes; the original operation returns tensors of the same shapes.
    """
    _, _, signature = str(original._schema).partition("(")
    _library.define(f"{name}({signature}", tags=original.tags)  # such as that it draws random numbers
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"funcamp::{name}", original, lib=_library)
    operation: OpOverload = getattr(torch.ops.funcamp, name).default
    return operation
