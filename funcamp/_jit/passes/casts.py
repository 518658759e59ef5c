"""Cast a group of parameters in one operation, and its gradients in one operation.

Under autocast each weight is cast at its use, and its gradient is cast back to float32. In flat storage the weights are
parts of one tensor, and so are the gradients. A cast of a part is the part of a cast, and a concatenation of casts is
the cast of a concatenation. So one kernel casts all weights of a group, once for all micro-batches, and their gradients
stay in the low precision until the optimizer's loop reads them: half of the bytes. No number changes.

A group that is gathered from slices is cast part by part, and so are parameters that are not in flat storage.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from funcamp._jit.passes.program import Pass, Program
from funcamp._trace.aliases import Aliases

_aten = torch.ops.aten
_CAST = _aten._to_copy.default
_SPLIT = _aten.split_with_sizes.default
_CAT = _aten.cat.default
_VIEWS = (_aten.view.default, _aten.slice.Tensor, _aten.detach.default, _aten.t.default, _aten.alias.default)
_LOW = (torch.float16, torch.bfloat16)


class _Group(NamedTuple):
    """An input of a program in flat storage, parts of which are cast."""

    flat: fx.Node
    sizes: tuple[int, ...]
    """Those of its parts."""
    dtype: torch.dtype
    """The dtype of the casts."""


class _CastOfPart(NamedTuple):
    """A cast of a part of a group."""

    node: fx.Node
    views: list[fx.Node]
    """The views between the split and the cast, the last one first; the one after the split takes the part."""

    @property
    def part(self) -> int:
        """The number of the part."""
        number: Any = self.views[-1].args[1]
        return int(number)


class _Writes:
    """Where a graph, as it was traced, writes to the memory of its nodes. What a pass has added writes nothing."""

    def __init__(self, graph: fx.Graph) -> None:
        self._aliases = Aliases(graph)
        self._positions = {node: position for position, node in enumerate(graph.nodes)}

    def of(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that write to the memory of a node."""
        root = self._aliases.root.get(node)
        return [] if root is None else self._aliases.writers.get(root, [])

    def are_before(self, node: fx.Node, last: fx.Node) -> bool:
        """Return whether the memory of a node is written before another node, if at all."""
        return all(self._positions[writer] < self._positions[last] for writer in self.of(node))

    def are_after(self, node: fx.Node, first: fx.Node) -> bool:
        """Return whether the memory of a node is written after another node, if at all."""
        return all(self._positions[writer] > self._positions[first] for writer in self.of(node))


def casts(program: Program) -> Program:
    """Return the program with casts of whole groups."""
    graph = program.module.graph
    writes = _Writes(graph)
    casts_by_group: dict[_Group, list[_CastOfPart]] = {}
    for group, cast in _casts_of_parts(graph):
        if not writes.of(cast.node):  # else another cast of the part would have the new values
            casts_by_group.setdefault(group, []).append(cast)
    with program.mode:
        for group, parts in casts_by_group.items():
            if _is_mostly_cast(group, parts) and writes.are_after(group.flat, parts[-1].node):
                _cast_before_split(graph, group, parts)
        for node in graph.find_nodes(op="call_function", target=_CAT):
            _cast_after_join(graph, node, writes)
    return program


def _casts_of_parts(graph: fx.Graph) -> Iterator[tuple[_Group, _CastOfPart]]:
    """Yield the casts of parts of inputs to a low precision, in the order of the program."""
    for node in graph.find_nodes(op="call_function", target=_CAST):
        dtype = _new_dtype(node)
        views = _views_above(node.args[0], (*_VIEWS, operator.getitem))
        if dtype not in _LOW or not views or views[-1].target is not operator.getitem:
            continue
        split: Any = views[-1].args[0]
        if split.target is _SPLIT and split.args[0].op == "placeholder":
            flat, sizes = split.args
            yield _Group(flat, tuple(sizes), dtype), _CastOfPart(node, views)


def _new_dtype(cast: fx.Node) -> torch.dtype | None:
    """Return the dtype to which a cast goes; None if it changes anything else."""
    source: Any = cast.args[0]
    example = source.meta["val"]
    unchanged = {"layout": example.layout, "device": example.device}
    dtype: torch.dtype | None = None
    for name, argument in cast.kwargs.items():
        if name == "dtype":
            assert isinstance(argument, torch.dtype)
            dtype = argument
        elif argument != unchanged.get(name):
            return None
    return dtype


def _is_mostly_cast(group: _Group, parts: list[_CastOfPart]) -> bool:
    """Return whether the parts that are cast are half of a group or more: the cast of all then costs less."""
    cast_size = sum(group.sizes[number] for number in {cast.part for cast in parts})
    return 2 * cast_size >= sum(group.sizes)


def _cast_before_split(graph: fx.Graph, group: _Group, parts: list[_CastOfPart]) -> None:
    """Cast a group once, in the place of its parts."""
    with graph.inserting_before(parts[0].node):
        low_group = _emit(graph, _CAST, (group.flat,), {"dtype": group.dtype})
        low_parts = _emit(graph, _SPLIT, (low_group, group.sizes), {})
    for cast in parts:
        with graph.inserting_before(cast.node):
            value = _emit_views(graph, cast.views, low_parts)
        cast.node.replace_all_uses_with(value)
        graph.erase_node(cast.node)


def _cast_after_join(graph: fx.Graph, join: fx.Node, writes: _Writes) -> None:
    """Cast a concatenation of tensors that are all cast from one dtype, instead of the tensors."""
    parts: Any = join.args[0]
    views_of_parts: list[list[fx.Node]] = []
    sources: list[fx.Node] = []
    for part in parts:
        views = _views_above(part, _VIEWS)
        cast: Any = views[-1].args[0] if views else part
        if cast.target is not _CAST or _new_dtype(cast) != torch.float32:
            return
        source = cast.args[0]
        if writes.of(cast) or not writes.are_before(source, cast):
            return
        views_of_parts.append(views)
        sources.append(source)
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
