"""Zeros that have memory, for a compiler that reads them.

Derivatives of constants, as torch.func.jvp and the derivative of torch.sgn have them, are zeros without memory; code
that Inductor generates reads them all the same (torch 2.11 to 2.13).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcamp._jit.passes.program import Pass
from funcamp._jit.passes.table import Decompositions
from funcamp._upstream import ZERO_TENSORS


def _zeros(size: list[int], **options: Any) -> Tensor:
    return torch.zeros(size, **options)


def zeros_with_memory(_: Decompositions) -> Decompositions:
    """Return the entry."""
    return {torch.ops.aten._efficientzerotensor.default: _zeros}


PASS = Pass(
    name="zero_tensors",
    why="generated code reads zeros that have no memory, such as derivatives of constants",
    evidence="https://github.com/pytorch/pytorch/issues/177261",
    where=lambda target: target.by_inductor and ZERO_TENSORS,
    run=lambda program: program.extended(zeros_with_memory),
    defect=True,
)
