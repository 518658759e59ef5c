"""Rows taken by a new permutation: `x[torch.randperm(n)]`, as mixup has it.

Inductor has patterns that leave out the check of the indices' bounds. Up to torch 2.13 one raises if the permutation is
not sliced; those of 2.14 and 2.15 draw again for `order[order]` (https://github.com/pytorch/pytorch/issues/183988).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from funcamp._jit.passes.program import Pass, Program

_aten: Any = torch.ops.aten


def index_without_check(graph: fx.Graph) -> None:
    """Let a traced graph do what the patterns do: index without the check."""
    for node in graph.nodes:
        if node.target is _aten.index.Tensor:
            x, indices = node.args
        elif node.target is _aten.index_select.default and node.args[1] == 0:
            x, _, *indices = node.args
        else:
            continue
        shape = x.meta["val"].shape
        # index_select takes rows of a tensor of shape () too, as if its shape were (1,).
        if len(indices) == 1 and len(shape) > 0 and _largest(indices[0]) < shape[0]:
            node.target = _aten._unsafe_index.Tensor
            node.args = (x, list(indices))


def _largest(node: Any) -> float:
    """Return the largest number of a permutation or of a slice of one; infinity for anything else."""
    while isinstance(node, fx.Node) and node.target is _aten.slice.Tensor:
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target is not _aten.randperm.default:
        return float("inf")
    length = node.args[0]
    return length - 1 if isinstance(length, int) else float("inf")


def _run(program: Program) -> Program:
    index_without_check(program.module.graph)
    return program


PASS = Pass(
    name="permutations",
    why="Inductor raises for x[torch.randperm(n)], or draws a second permutation for order[order]",
    evidence="https://github.com/pytorch/pytorch/issues/183988",
    where=lambda target: target.by_inductor,
    run=_run,
    defect=True,
)
