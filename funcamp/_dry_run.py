"""Why a step cannot be compiled: run it on tensors without values, and say what it did and in which line."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._signature import check_like, kinds
from funcamp._types import Tree
from funcamp._user_line import INSTEAD, READS, in_traceback

_READS = ("tensor subclass", "FakeTensor", "data is not allocated")


def dry_run(call: str, step: Any, state: Tree, batch: Tree) -> None:
    """Run a step without computing anything.

    What the step keeps of its tensors for later calls is spoilt afterwards: run it where it has failed already, or
    where it keeps nothing.

    Raises:
        TypeError: the step returns no pair.
        ValueError: the new state differs from the one given in structure, or a leaf of it in shape, dtype or device.
        RuntimeError: the step reads a value on the host, or differentiates by autograd's tape.
        Exception: what the step itself raises.
    """
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
    )

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    flat, spec = _tree.flatten((state, batch))
    without = [fake.from_tensor(leaf.detach()) if isinstance(leaf, Tensor) else leaf for leaf in flat]
    given = _tree.unflatten(without, spec)
    try:
        with torch.no_grad(), fake:
            out = step(*given)
    except Exception as error:
        text, where = str(error), in_traceback(error)
        if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)) or any(
            sign in text for sign in _READS
        ):
            raise RuntimeError(f"{call}: step must {READS}; {where} does: {INSTEAD}") from None
        if "does not require grad" in text:
            raise RuntimeError(
                f"{call}: step must differentiate with torch.func, for it runs without autograd's tape; {where} uses it"
            ) from None
        raise
    check_result(call, kinds(state), out)


def check_result(call: str, like: Tree, out: Any) -> None:
    """Raise where a step's result is no pair of a state like the one it took, given as kinds, and metrics."""
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(f"{call}: step must return the pair (state, metrics); got {type(out).__name__}")
    check_like(("state", "the step's new state"), like, out[0])
