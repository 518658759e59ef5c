"""Cast a group of parameters in one operation, and its gradients in one operation.

Under autocast each weight is cast at its use, and its gradient is cast back to float32. In flat storage the weights are
parts of one tensor, and so are the gradients. A cast of a part is the part of a cast, and a concatenation of casts is
the cast of a concatenation. So one kernel casts all weights of a group, once for all micro-batches, and their gradients
stay in the low precision until the optimizer's loop reads them: half of the bytes. No number changes.

A group that is gathered from slices is cast part by part, and so are parameters that are not in flat storage, and small
vectors that a layer passes as separate inputs: what reads them casts them.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from funcamp._jit.passes.emit import emit
from funcamp._jit.passes.program import NARROW, Pass, Program
from funcamp._jit.passes.writes import written_early
from funcamp._trace.aliases import Aliases

_aten = torch.ops.aten
_CAST = _aten._to_copy.default
_SPLIT = _aten.split_with_sizes.default
_CAT = _aten.cat.default
_ZEROS = _aten.new_zeros.default
_VIEWS = (_aten.view.default, _aten.slice.Tensor, _aten.detach.default, _aten.t.default, _aten.alias.default)
#: What puts a gradient in the order of its part of flat storage.
_COPIES = (_aten.clone.default, _aten._unsafe_view.default)


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


class _CastInJoin(NamedTuple):
    """A cast in a concatenation."""

    node: Any
    views: list[fx.Node]
    """The views between the cast and the concatenation, the last one first."""


def casts(program: Program) -> Program:
    """Return the program with casts of whole groups."""
    graph = program.module.graph
    aliases = Aliases(graph)
    roots_written = written_early(graph, aliases)
    # What is written is cast where it is.
    written = {node for node, root in aliases.root.items() if root in roots_written}
    casts_by_group: defaultdict[_Group, list[_CastOfPart]] = defaultdict(list)
    for group, cast in _casts_of_parts(graph):
        if written.isdisjoint((group.flat, cast.node)):
            casts_by_group[group].append(cast)
    with program.mode:
        for group, parts in casts_by_group.items():
            if _is_mostly_cast(group, parts):
                _cast_before_split(graph, group, parts)
        for node in graph.find_nodes(op="call_function", target=_CAT):
            _cast_after_join(graph, node, written)
    return program


def _casts_of_parts(graph: fx.Graph) -> Iterator[tuple[_Group, _CastOfPart]]:
    """Yield the casts of parts of inputs to a low precision, in the order of the program."""
    for node in graph.find_nodes(op="call_function", target=_CAST):
        dtype = node.meta["val"].dtype
        views = _views_above(node.args[0], (*_VIEWS, operator.getitem))
        if dtype not in NARROW or not _is_cast(node) or not views or views[-1].target is not operator.getitem:
            continue
        split: Any = views[-1].args[0]
        if split.target is _SPLIT and split.args[0].op == "placeholder":
            flat, sizes = split.args
            yield _Group(flat, tuple(sizes), dtype), _CastOfPart(node, views)


def _is_cast(node: fx.Node) -> bool:
    """Return whether a node changes the dtype of a tensor, and nothing else."""
    source: Any = node.args[0] if node.target is _CAST else None
    if not isinstance(source, fx.Node):  # vmap casts numbers, too
        return False
    before, after = source.meta["val"], node.meta["val"]
    return bool(before.device == after.device and before.stride() == after.stride())


def _is_mostly_cast(group: _Group, parts: list[_CastOfPart]) -> bool:
    """Return whether the parts that are cast are half of a group or more: the cast of all then costs less."""
    cast_size = sum(group.sizes[number] for number in {cast.part for cast in parts})
    return 2 * cast_size >= sum(group.sizes)


def _cast_before_split(graph: fx.Graph, group: _Group, parts: list[_CastOfPart]) -> None:
    """Cast a group once, in the place of its parts."""
    with graph.inserting_before(parts[0].node):
        low_group = emit(graph, _CAST, (group.flat,), {"dtype": group.dtype})
        low_parts = emit(graph, _SPLIT, (low_group, group.sizes), {})
    for cast in parts:
        with graph.inserting_before(cast.node):
            value = _emit_views(graph, cast.views, low_parts)
        cast.node.replace_all_uses_with(value)
        graph.erase_node(cast.node)


def _cast_after_join(graph: fx.Graph, join: fx.Node, written: set[fx.Node]) -> None:
    """Cast a concatenation of tensors that are all cast from one dtype to float32, instead of the tensors."""
    parts: Any = join.args[0]
    # Zeros fill up the storage of another part.
    cast_of = {part: _cast_in_join(part) for part in parts if part.target is not _ZEROS}
    casts = cast_of.values()
    if not all(_is_cast(cast.node) and cast.node.meta["val"].dtype == torch.float32 for cast in casts):
        return
    dtypes = {cast.node.args[0].meta["val"].dtype for cast in casts}
    if len(dtypes) != 1 or not dtypes <= set(NARROW):
        return
    if not written.isdisjoint(node for cast in casts for node in (cast.node, cast.node.args[0], *cast.views)):
        return
    (dtype,) = dtypes
    with graph.inserting_before(join):
        low_parts: list[fx.Node] = []
        for part in parts:
            if part in cast_of:
                cast = cast_of[part]
                low_parts.append(_emit_views(graph, cast.views, cast.node.args[0]))
            else:
                low_parts.append(emit(graph, _ZEROS, part.args, {**part.kwargs, "dtype": dtype}))
        low_join = emit(graph, _CAT, (low_parts, *join.args[1:]), {})
        value = emit(graph, _CAST, (low_join,), {"dtype": torch.float32})
    join.replace_all_uses_with(value)
    graph.erase_node(join)


def _cast_in_join(part: fx.Node) -> _CastInJoin:
    """Return what a part of a concatenation is a view of, which may be a cast."""
    views = _views_above(part, (*_VIEWS, *_COPIES))
    return _CastInJoin(views[-1].args[0] if views else part, views)


def _views_above(node: Any, operations: tuple[Any, ...]) -> list[fx.Node]:
    """Return the views of which a node is the last, the last one first."""
    views: list[fx.Node] = []
    while isinstance(node, fx.Node) and node.target in operations:
        views.append(node)
        node = node.args[0]
    return views


def _emit_views(graph: fx.Graph, views: list[fx.Node], value: fx.Node) -> fx.Node:
    """Add the same views of another value."""
    for view in reversed(views):
        value = emit(graph, view.target, (value, *view.args[1:]), view.kwargs)
    return value


PASS = Pass(
    name="casts",
    why="a group of parameters is cast once, and its gradients too, not each of its parts",
    evidence="benchmarks/casts.py",
    where=lambda target: target.by_inductor and not target.is_open,
    run=casts,
)
