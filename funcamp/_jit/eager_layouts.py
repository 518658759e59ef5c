"""Keep the layouts of the trace if Inductor's decomposition of an operation has another one.

A graph's views were traced with the layouts of eager mode. For example, `cat` of a tensor and an empty one is
contiguous; Inductor's decomposition is a clone in the tensor's own order, for which the traced `view` is impossible.
"""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx

from funcamp import _tree, _upstream

#: An index among several results, and the dimensions from the outermost in memory to the innermost.
_Order = tuple[int | None, list[int]]


def keep_layouts(module: fx.GraphModule, mode: AbstractContextManager[Any]) -> None:
    """Give such results the layout of the trace.

    Args:
        module: its graph is changed in place; not recompiled.
        mode: the mode of its fake tensors.
    """
    table = _upstream.find("torch._inductor.decomposition.select_decomp_table")()
    known: dict[Any, list[_Order]] = {}
    with mode, torch.no_grad():
        for node in list(module.graph.nodes):
            if node.target not in table or any(result.alias_info for result in node.target._schema.returns):
                continue
            key = node.target, *_kinds(node)
            if key not in known:
                known[key] = _orders(node, table[node.target])
            for index, order in known[key]:
                for result in [node] if index is None else [user for user in node.users if _picks(user, index)]:
                    _lay_out(result, order)


def _kinds(node: fx.Node) -> list[Any]:
    leaves, spec = _tree.flatten((node.args, node.kwargs))
    values = [leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
    return [
        str(spec),
        *[
            (value.shape, value.stride(), value.dtype, value.device)
            if isinstance(value, Tensor)
            else (type(value), str(value))
            for value in values
        ],
    ]


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
        (index, sorted(range(value.dim()), key=value.stride, reverse=True))
        for index, (value, other) in pairs
        if isinstance(value, Tensor) and isinstance(other, Tensor) and _steps(value) != _steps(other)
    ]


def _steps(value: Tensor) -> list[int]:
    return [stride for size, stride in zip(value.shape, value.stride()) if size > 1]


def _picks(user: fx.Node, index: int) -> bool:
    return user.target is operator.getitem and user.args[1:] == (index,)


def _lay_out(result: fx.Node, order: list[int]) -> None:
    graph, aten = result.graph, torch.ops.aten
    back = sorted(range(len(order)), key=order.__getitem__)
    with graph.inserting_after(result):
        permuted = graph.call_function(aten.permute.default, (result, order))
    with graph.inserting_after(permuted):
        copied = graph.call_function(aten.clone.default, (permuted,), {"memory_format": torch.contiguous_format})
    with graph.inserting_after(copied):
        laid_out = graph.call_function(aten.permute.default, (copied, back))
    for node, shape in ((permuted, order), (copied, order), (laid_out, None)):
        value = result.meta["val"]
        node.meta = {**result.meta, "val": value if shape is None else value.permute(shape)}
    result.replace_all_uses_with(laid_out, delete_user_cb=lambda user: user is not permuted)
