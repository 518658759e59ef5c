"""An Inductor pass that keeps inputs and results separate, and donated state correct if a new leaf is an old one.

No result of a traced step is an input. But Inductor removes a product with 1 or a sum with 0, and what is left may be
an input, which the caller may write later.

A donated step ends in one `old.copy_(new)` per leaf. Every new value is a snapshot, taken before the first write. But
Inductor removes a snapshot that only copies an input (`remove_noop_ops`), and then writes back in the order of the
leaves: with `prev := cur; cur := f(cur)` prev silently gets the new cur, and so does a part of prev that is returned
(fixed in 2.15). A read of a part of a complex leaf still comes too late
(torch 2.11 to 2.15). A leaf with some elements replaced (`index_put`, `slice_scatter`) is computed in the memory of the
leaf, although the leaf gets another value later or is still read (2.11 to 2.15; pytorch#198096). The same happens to
the results of functions that change arguments, and of `torch._foreach_` operations.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from funcamp._jit.passes.graph_pass import GraphPass
from funcamp._jit.passes.program import Pass, Program
from funcamp._jit.passes.writes import writes_input
from funcamp._upstream.chains import chain_start, nodes_behind

_aten = torch.ops.aten
_COPY = _aten.copy_.default
#: Operations that Inductor may compute in the memory of their first argument.
_IN_PLACE = {
    _aten.index_put.default,
    _aten._unsafe_index_put.default,
    _aten.slice_scatter.default,
    _aten.select_scatter.default,
    _aten.diagonal_scatter.default,
    _aten.as_strided_scatter.default,
}
#: Operations of other libraries that write into arguments, as functions.
_FUNCTIONALIZED = {
    torch.ops.higher_order.auto_functionalized,
    torch.ops.higher_order.auto_functionalized_v2,
}


class SnapshotWriteBacks(GraphPass):
    """Computes results that are inputs, and before the first write whatever is an input to be written."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Change the graph in place."""
        writes = [node for node in graph.nodes if writes_input(node)]
        written_inputs = {write.args[0] for write in writes}
        for target in written_inputs:
            if target.meta["val"].is_complex():
                _read_early(graph, target)
        _change_copies(graph, written_inputs)
        output = graph.output_node()
        first_write = writes[0] if writes else output

        def snapshot_of(source: torch.fx.Node) -> torch.fx.Node:
            with graph.inserting_before(first_write):
                return _recomputed(graph, source)

        snapshots: dict[torch.fx.Node, torch.fx.Node] = {}
        for write in writes:
            target, source, *other_arguments = write.args
            if _needs_snapshot(target, source):
                if source not in snapshots:
                    snapshots[source] = snapshot_of(source)
                source = snapshots[source]
            write.args = (target, source, *other_arguments)

        def copy_if_needed(result: torch.fx.Node) -> torch.fx.Node:
            return snapshot_of(result) if _may_be_input(result) else result

        # Each result gets separate memory, also if two of them are equal to one input.
        output.args = (torch.fx.map_arg(output.args[0], copy_if_needed),)


def _needs_snapshot(target: torch.fx.Node, source: torch.fx.Node) -> bool:
    """Return whether the value of a write may have changed when it is written, unless it is computed before."""
    if source is target:
        return False
    # Writes into views of a complex tensor are calls of torch, which Inductor does not put in order.
    is_own_update = _updated_jointly(source) is target
    return bool(target.meta["val"].is_complex()) or (_may_be_input(source) and not is_own_update)


def _may_be_input(value: torch.fx.Node) -> bool:
    """Return whether a value is an input once Inductor has removed what changes nothing, or in the memory of one."""
    start = chain_start(value, lambda node: _updated_jointly(node) is None)
    start = _updated_jointly(start) or start
    return isinstance(start, torch.fx.Node) and start.op == "placeholder"


def _read_early(graph: torch.fx.Graph, target: torch.fx.Node) -> None:
    """Make all readers of a complex input read a copy."""
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        copy = _recomputed(graph, target)
    for reader in list(target.users):
        if reader is not copy and (reader.target is not _COPY or reader.args[0] is not target):
            reader.replace_input_with(target, copy)


def _change_copies(graph: torch.fx.Graph, written_inputs: set[torch.fx.Node]) -> None:
    """Give operations that may work in place a copy of what they change, unless nothing else needs its values."""

    def copy_for(node: torch.fx.Node, value: torch.fx.Node) -> torch.fx.Node:
        with graph.inserting_before(node):
            return _recomputed(graph, value)

    for node in list(graph.nodes):
        if _may_work_in_place(node):
            base: Any = node.args[0]
            start = chain_start(base)
            is_read_besides = start in nodes_behind(node.args[1:])
            if is_read_besides or (start in written_inputs and not _is_new_value(node, start)):
                node.args = (copy_for(node, base), *node.args[1:])
        elif node.target in _FUNCTIONALIZED:
            argument_nodes: list[torch.fx.Node] = []
            torch.fx.map_arg(dict(node.kwargs), argument_nodes.append)
            for value in dict.fromkeys(argument_nodes):
                if chain_start(value) in written_inputs:
                    node.replace_input_with(value, copy_for(node, value))


def _may_work_in_place(node: torch.fx.Node) -> bool:
    return node.target in _IN_PLACE or str(node.target) == "_c10d_functional.all_reduce.default"


def _is_new_value(node: torch.fx.Node, target: torch.fx.Node) -> bool:
    """Return whether a result is used for nothing but the new value of an input."""
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is _COPY:
            return user.args[:2] == (target, node)
        if not _may_work_in_place(user) or user.args[0] is not node or target in nodes_behind(user.args[1:]):
            return False
        node = user
    return False


def _updated_jointly(value: torch.fx.Node) -> torch.fx.Node | None:
    """Return what an item of a list was before a `torch._foreach_` operation, which may work in place, else None."""
    if not isinstance(value, torch.fx.Node) or value.target is not operator.getitem:
        return None
    list_operation: Any = value.args[0]
    index: Any = value.args[1]
    if not str(list_operation.target).startswith("aten._foreach_"):
        return None
    before: torch.fx.Node = chain_start(list_operation.args[0][index])
    return before


def _recomputed(graph: torch.fx.Graph, source: torch.fx.Node) -> torch.fx.Node:
    """Return the same values by an operation that Inductor does not remove as a copy."""
    value = source.meta["val"]
    if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
        node = graph.call_function(_aten.mul.Tensor, (source, 1))
    else:
        node = graph.call_function(_aten.bitwise_or.Tensor, (source, source))
    node.meta = dict(source.meta)
    return node


def _run(program: Program) -> Program:
    snapshots = SnapshotWriteBacks(program.cache_name)
    return program._replace(options={**program.options, "post_grad_custom_pre_pass": snapshots})


PASS = Pass(
    name="write_backs",
    why="Inductor writes new leaves back in their order, and removes copies that keep inputs and results separate",
    evidence="https://github.com/pytorch/pytorch/issues/198131; https://github.com/pytorch/pytorch/pull/198096",
    where=lambda target: target.by_inductor,
    run=_run,
    defect=True,
)
