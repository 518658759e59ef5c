"""Cast a group of parameters in one operation, and its gradients in one operation.

Under autocast each weight is cast at its use, and its gradient is cast back to float32. In flat storage the weights are
parts of one tensor, and so are the gradients. A cast of a part is the part of a cast, and a concatenation of casts is
the cast of a concatenation. So one kernel casts all weights of a group, and their gradients stay in the low precision
until the optimizer's loop reads them: half of the bytes. No number changes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from funcamp._jit.passes.program import Pass, Program

_aten = torch.ops.aten
_CAST = _aten._to_copy.default
_SPLIT = _aten.split_with_sizes.default
_CAT = _aten.cat.default
_VIEWS = (_aten.view.default, _aten.detach.default, _aten.t.default, _aten.alias.default)
_LOW = (torch.float16, torch.bfloat16)


def casts(program: Program) -> Program:
    """Return the program with casts of whole groups."""
    graph = program.module.graph
    splits: dict[Any, fx.Node] = {}
    with program.mode:
        for node in graph.find_nodes(op="call_function", target=_CAST):
            if _new_dtype(node) in _LOW:
                _cast_before_split(graph, node, splits)
        for node in graph.find_nodes(op="call_function", target=_CAT):
            _cast_after_join(graph, node)
    return program


def _new_dtype(cast: fx.Node) -> torch.dtype | None:
    """Return the dtype to which a cast goes; None if it changes anything else."""
    source: Any = cast.args[0]
    example = source.meta["val"]
    unchanged = {"layout": example.layout, "device": example.device}
    dtype: Any = None
    for name, argument in cast.kwargs.items():
        if name == "dtype":
            dtype = argument
        elif argument != unchanged.get(name):
            return None
    return dtype


def _cast_before_split(graph: fx.Graph, cast: fx.Node, splits: dict[Any, fx.Node]) -> None:
    """Cast an input of which a part is cast, instead of the part.

    `splits` has the casts that were made before, in parts.
    """
    views = _views_above(cast.args[0], (*_VIEWS, operator.getitem))
    source: Any = views[-1].args[0] if views else cast.args[0]
    if source.target is not _SPLIT or source.args[0].op != "placeholder":
        return
    flat, sizes = source.args
    dtype = cast.kwargs["dtype"]
    key = (flat, tuple(sizes), dtype)
    with graph.inserting_before(cast):
        if key not in splits:
            splits[key] = _emit(graph, _SPLIT, (_emit(graph, _CAST, (flat,), {"dtype": dtype}), sizes), {})
        value = _emit_views(graph, views, splits[key])
    cast.replace_all_uses_with(value)
    graph.erase_node(cast)


def _cast_after_join(graph: fx.Graph, join: fx.Node) -> None:
    """Cast a concatenation of tensors that are all cast from one dtype, instead of the tensors."""
    parts: Any = join.args[0]
    views_of_parts: list[list[fx.Node]] = []
    sources: list[fx.Node] = []
    for part in parts:
        views = _views_above(part, _VIEWS)
        cast: Any = views[-1].args[0] if views else part
        if cast.target is not _CAST or _new_dtype(cast) != torch.float32:
            return
        views_of_parts.append(views)
        sources.append(cast.args[0])
    dtypes = {source.meta["val"].dtype for source in sources}
    if len(dtypes) != 1 or not dtypes <= set(_LOW):
        return
    with graph.inserting_before(join):
        low_parts = [_emit_views(graph, views, source) for views, source in zip(views_of_parts, sources)]
        low_join = _emit(graph, _CAT, (low_parts, *join.args[1:]), {})
        value = _emit(graph, _CAST, (low_join,), {"dtype": torch.float32})
    join.replace_all_uses_with(value)
    graph.erase_node(join)


def _views_above(node: Any, kinds: tuple[Any, ...]) -> list[fx.Node]:
    """Return the views of which a node is the last, the last one first."""
    views: list[fx.Node] = []
    while node.op == "call_function" and node.target in kinds:
        views.append(node)
        node = node.args[0]
    return views


def _emit_views(graph: fx.Graph, views: list[fx.Node], value: fx.Node) -> fx.Node:
    """Add the same views of another value."""
    for view in reversed(views):
        value = _emit(graph, view.target, (value, *view.args[1:]), view.kwargs)
    return value


def _emit(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """Add an operation, with its value."""
    node = graph.call_function(target, args, kwargs)
    example_args = fx.map_arg(args, lambda argument: argument.meta["val"])
    node.meta["val"] = target(*example_args, **kwargs)
    return node


PASS = Pass(
    name="casts",
    why="a group of parameters is cast once, and its gradients too, not each of its parts",
    evidence="benchmarks/casts.py",
    where=lambda target: target.by_inductor and not target.is_open,
    run=casts,
)
