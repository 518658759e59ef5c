"""Restore the layouts of the trace if the program has other ones, in which a traced view may be impossible.

Inductor decomposes operations: `cat` of a tensor and an empty one is contiguous, and Inductor's clone of the tensor has
the tensor's own order. A batch norm of a transposed tensor is contiguous on a CPU, and transposed if it is decomposed
(pytorch#192668, open; a trace has the kernel's layout, `_upstream/kernel_layouts.py`).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from funcamp._jit.passes.program import Pass, Program
from funcamp._trace.open_shapes import has_open_result
from funcamp._types import Operation


def keep_layouts(program: Program) -> Program:
    """Give the results of decomposed operations the layout of the trace, except those of open operations."""
    graph = program.module.graph
    table = program.table
    with program.mode, torch.no_grad():
        for node in list(graph.nodes):
            if node.target not in table or _returns_view(node):
                continue
            if program.target.is_open and any(map(has_open_result, (node, *node.all_input_nodes))):
                continue
            for number in _laid_out_otherwise(node, table[node.target]):
                for result in _results_at(node, number):
                    lay_out(result)
    return program


def _returns_view(node: fx.Node) -> bool:
    """Return whether an operation returns a view of an argument."""
    results = node.target._schema.returns  # type: ignore[union-attr]
    return any(result.alias_info for result in results)


def _results_at(node: fx.Node, number: int) -> list[fx.Node]:
    """Return the nodes with the result of a node at a number; the node itself if there is one result."""
    if isinstance(node.meta["val"], Tensor):
        return [node]
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == number]


def _laid_out_otherwise(node: fx.Node, decomposition: Operation) -> list[int]:
    """Return the numbers of the results of an operation that have another layout if it is decomposed."""
    traced = _listed(node.meta["val"])
    if not any(map(_has_order, traced)):
        return []
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda other: other.meta["val"])
    try:
        decomposed = decomposition(*args, **kwargs)
    except Exception:  # Inductor will raise it
        return []
    if decomposed is NotImplemented:
        return []
    numbers: list[int] = []
    for number, (value, other) in enumerate(zip(traced, _listed(decomposed))):
        are_tensors = _has_order(value) and isinstance(other, Tensor)
        if are_tensors and _strides_that_matter(value) != _strides_that_matter(other):
            numbers.append(number)
    return numbers


def _listed(value: Any) -> list[Any]:
    """Return the results of an operation, of which there may be one or several."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _has_order(value: object) -> bool:
    """Return whether a result is a tensor whose dimensions have an order in memory."""
    return isinstance(value, Tensor) and value.dim() > 1


def laid_out_as(value: Tensor, like: Tensor) -> Tensor:
    """Return a tensor in the layout of another of its shape; unchanged if it has it, or if the other is not dense."""
    if _strides_that_matter(value) == _strides_that_matter(like):
        return value
    order = _order_of(like)
    laid_out = value.permute(order).contiguous().permute(_inverse(order))
    return laid_out if _strides_that_matter(laid_out) == _strides_that_matter(like) else value


def _order_of(value: Tensor) -> list[int]:
    """Return the dimensions from the outermost in memory to the innermost."""
    return sorted(range(value.dim()), key=value.stride, reverse=True)


def _inverse(order: list[int]) -> list[int]:
    """Return the permutation that undoes another one."""
    return sorted(range(len(order)), key=order.__getitem__)


def _strides_that_matter(value: Tensor) -> list[int]:
    """Return the strides of the dimensions with several elements."""
    return [stride for size, stride in zip(value.shape, value.stride()) if size > 1]


def lay_out(result: fx.Node) -> None:
    """Make all users of a result read it in the layout of the trace."""
    graph = result.graph
    aten = torch.ops.aten
    value = result.meta["val"]
    order = _order_of(value)
    with graph.inserting_after(result):
        permuted = graph.call_function(aten.permute.default, (result, order))
    with graph.inserting_after(permuted):
        copied = graph.call_function(aten.clone.default, (permuted,), {"memory_format": torch.contiguous_format})
    with graph.inserting_after(copied):
        laid_out = graph.call_function(aten.permute.default, (copied, _inverse(order)))
    permuted.meta = {**result.meta, "val": value.permute(order)}
    copied.meta = {**result.meta, "val": value.permute(order)}
    laid_out.meta = {**result.meta, "val": value}
    result.replace_all_uses_with(laid_out, delete_user_cb=lambda user: user is not permuted)


PASS = Pass(
    name="layouts",
    why="Inductor gives some results another layout than the trace, for which a traced view may be impossible",
    evidence="https://github.com/pytorch/pytorch/issues/192668; tests/jit/test_eager_layouts.py",
    where=lambda target: target.by_inductor,
    run=keep_layouts,
    defect=True,
)
