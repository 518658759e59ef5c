"""Keep the layouts of the trace where a program has others, for which a traced view may be impossible.

Inductor decomposes operations: `cat` of a tensor and an empty one is contiguous, and Inductor's clone of the tensor has
the tensor's own order. And torch's rules for tensors without values err: a batch norm of a transposed input is
contiguous on a CPU, and transposed in a trace (pytorch#192668, open).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from funcamp._jit.passes.program import Pass, Program
from funcamp._trace.open_shapes import is_open_node

#: An index among several results, and the dimensions from the outermost in memory to the innermost.
_Order = tuple[int | None, list[int]]


def keep_layouts(program: Program) -> Program:
    """Give the results of decomposed operations the layout of the trace, except those of open operations."""
    graph, table = program.module.graph, program.table
    known: dict[str, list[_Order]] = {}
    with program.mode, torch.no_grad():
        for node in list(graph.nodes):
            if node.target not in table or any(result.alias_info for result in node.target._schema.returns):
                continue
            if is_open_node(node):
                continue
            key = str((node.target, fx.map_arg((node.args, node.kwargs), lambda other: _kinds(other.meta["val"]))))
            if key not in known:
                known[key] = _orders(node, table[node.target])
            for index, order in known[key]:
                for result in [node] if index is None else [user for user in node.users if _picks(user, index)]:
                    lay_out(result, order)
    return program


def laid_out_as(value: Tensor, like: Tensor) -> Tensor:
    """Return a tensor in the layout of another of its shape; itself if it has it, or that one is not dense."""
    if _steps(value) == _steps(like):
        return value
    found = _in_order(value, order_of(like))
    return found if _steps(found) == _steps(like) else value


def order_of(value: Tensor) -> list[int]:
    """Return the dimensions from the outermost in memory to the innermost."""
    return sorted(range(value.dim()), key=value.stride, reverse=True)


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _in_order(value: Tensor, order: list[int]) -> Tensor:
    return value.permute(order).contiguous().permute(_inverse(order))


def _kinds(value: Any) -> str:
    """Return the shapes, strides, dtypes and devices of the tensors in an example value, and its numbers."""
    if isinstance(value, Tensor):
        return f"{value.shape}, {value.stride()}, {value.dtype}, {value.device}"
    return f"[{', '.join(map(_kinds, value))}]" if isinstance(value, (list, tuple)) else str(value)


def _orders(node: fx.Node, decomposition: Any) -> list[_Order]:
    """Return which results of a node would have another layout, and the layout that they need."""
    wanted = node.meta["val"]
    several = isinstance(wanted, (list, tuple))
    if not any(isinstance(value, Tensor) and value.dim() > 1 for value in (wanted if several else [wanted])):
        return []
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda other: other.meta["val"])
    try:
        found = decomposition(*args, **kwargs)
    except Exception:  # Inductor will raise it
        return []
    if found is NotImplemented:
        return []
    pairs = list(enumerate(zip(wanted, found))) if several else [(None, (wanted, found))]
    return [
        (index, order_of(value))
        for index, (value, other) in pairs
        if isinstance(value, Tensor) and isinstance(other, Tensor) and _steps(value) != _steps(other)
    ]


def _steps(value: Tensor) -> list[int]:
    return [stride for size, stride in zip(value.shape, value.stride()) if size > 1]


def _picks(user: fx.Node, index: int) -> bool:
    return user.target is operator.getitem and user.args[1:] == (index,)


def lay_out(result: fx.Node, order: list[int]) -> None:
    """Let all that reads a result read it in another order in memory."""
    graph, aten = result.graph, torch.ops.aten
    with graph.inserting_after(result):
        permuted = graph.call_function(aten.permute.default, (result, order))
    with graph.inserting_after(permuted):
        copied = graph.call_function(aten.clone.default, (permuted,), {"memory_format": torch.contiguous_format})
    with graph.inserting_after(copied):
        laid_out = graph.call_function(aten.permute.default, (copied, _inverse(order)))
    for node, shape in ((permuted, order), (copied, order), (laid_out, None)):
        value = result.meta["val"]
        node.meta = {**result.meta, "val": value if shape is None else value.permute(shape)}
    result.replace_all_uses_with(laid_out, delete_user_cb=lambda user: user is not permuted)


PASS = Pass(
    name="layouts",
    why="Inductor gives some results another layout than the trace, for which a traced view may be impossible",
    evidence="https://github.com/pytorch/pytorch/issues/192668; tests/jit/test_eager_layouts.py",
    where=lambda target: target.by_inductor,
    run=keep_layouts,
    defect=True,
)
