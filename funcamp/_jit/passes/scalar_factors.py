"""x * s and x / s on a CPU, of x in 16 bits and s in a tensor of shape (): s is not rounded to 16 bits before.

Where s decides no dtype, as beside a tensor with dimensions, or as a count beside a loss in float16, torch's kernels
on a CPU compute these two with s in float32, and round once. Inductor rounds s first (with `emulate_precision_casts`):
in float16 a count of 100,000 tokens was infinite, and a loss divided by it 0. In all other operations, also s * x,
torch's kernels round s first too; a GPU's do in these two (native/cuda/Loops.cuh). Torch 2.11 to 2.15.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from funcamp._jit.passes.program import NARROW, Pass
from funcamp._jit.passes.table import Decompositions
from funcamp._types import Operation

_aten = torch.ops.aten


def scalar_factors(_: Decompositions) -> Decompositions:
    """Return the entries."""
    return {operation: functools.partial(_computed, operation) for operation in (_aten.mul.Tensor, _aten.div.Tensor)}


def _computed(operation: Operation, x: Tensor, other: Any) -> Any:
    """Return the result with the other factor in float32, if it is one number of another dtype; else leave it as is."""
    is_scalar = isinstance(other, Tensor) and other.numel() == 1 and other.dtype != x.dtype
    if is_scalar and x.dtype in NARROW and torch.result_type(x, other) == x.dtype and x.device.type == "cpu":
        return operation(x.float(), other.float()).to(x.dtype)
    return NotImplemented


PASS = Pass(
    name="scalar_factors",
    why="in 16 bits a factor of shape () would be rounded before the product, which torch's kernels on a CPU do not",
    evidence="tests/jit/test_rounded_values.py",
    where=lambda target: target.by_inductor and "cpu" in target.devices,
    run=lambda program: program.extended(scalar_factors),
    defect=True,
)
