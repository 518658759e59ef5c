"""A batch norm on a CPU keeps the statistics of a 16-bit batch in float32 for its backward pass, as the kernel does.

torch's decomposition rounds them to 16 bits. The gradient is a difference of nearly equal numbers, so that it was wrong
by 1 % in bfloat16, and by half in a layer with two values a channel (torch 2.11 to 2.15).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcamp._jit.passes.program import Pass
from funcamp._jit.passes.table import Decompositions

_aten = torch.ops.aten
_BATCH_NORMS = (
    _aten.native_batch_norm.default,
    _aten._native_batch_norm_legit.default,
    _aten._native_batch_norm_legit.no_stats,
    _aten._native_batch_norm_legit_functional.default,
)


def batch_norms(table: Decompositions) -> Decompositions:
    """Return the decompositions of batch norms, given the table before."""
    return {operation: functools.partial(_batch_norm, table[operation]) for operation in _BATCH_NORMS}


def _batch_norm(decomposition: Callable[..., Any], x: Tensor, *others: Any) -> Any:
    """Return the results of a decomposition in which only the first, and no statistics, is rounded to x's dtype."""
    is_mixed = any(isinstance(other, Tensor) and other.dtype != x.dtype for other in others)
    if x.device.type != "cpu" or not is_mixed:
        return decomposition(x, *others)
    result, *statistics = decomposition(x.float(), *others)
    return (result.to(x.dtype), *statistics)


PASS = Pass(
    name="batch_norms",
    why="torch's decomposition rounds the statistics of a 16-bit batch, which its kernel on a CPU does not",
    evidence="tests/jit/test_batch_norms.py",
    where=lambda target: target.by_inductor and "cpu" in target.devices,
    run=lambda program: program.extended(batch_norms),
    defect=True,
)
