"""An Inductor pass that keeps inputs and results apart, and donated state correct if a new leaf is an old one.

No result of a traced step is an input. But Inductor removes a product with 1 or a sum with 0, and what is left may be
an input, which the caller may write later.

A donated step ends in one `old.copy_(new)` per leaf. Every new value is a snapshot, taken before the first write. But
Inductor removes a snapshot that only copies an input (`remove_noop_ops`), and then writes back in the order of the
leaves: with `prev := cur; cur := f(cur)` prev silently gets the new cur, and so does a part of prev that is returned
(`_upstream.WRITE_BACK_ORDER`, fixed in 2.15). A read of a part of a complex leaf still comes too late
(`_upstream.COMPLEX_PARTS`). And a leaf with some elements replaced (`index_put`, `slice_scatter`) is computed in the
memory of the leaf, although that gets another value later (`_upstream.OVERWRITTEN_RESULT`) or is still read. So are the
results of functions that change arguments, and of `torch._foreach_` operations.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from funcamp import _upstream
from funcamp._jit.passes.graph_pass import GraphPass
from funcamp._jit.passes.program import Pass, Program
from funcamp._upstream.chains import behind, chain_start, is_view

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
        writes = [n for n in graph.nodes if n.target is _COPY and isinstance(n.args[0], torch.fx.Node)]
        writes = [n for n in writes if n.args[0].op == "placeholder"]
        written = {n.args[0] for n in writes}
        if _upstream.COMPLEX_PARTS.present:
            for target in written:
                if target.meta["val"].is_complex():
                    _read_early(graph, target)
        if _upstream.OVERWRITTEN_RESULT.present:
            _change_copies(graph, written)
        output = graph.output_node()

        def early(source: Any) -> torch.fx.Node:
            with graph.inserting_before(writes[0] if writes else output):
                return _recomputed(graph, source)

        def late(source: Any) -> bool:
            return _upstream.WRITE_BACK_ORDER.present and chain_start(source) in written

        def is_input(result: Any) -> bool:
            start = chain_start(result, lambda node: is_view(node) and _updated_jointly(node) is None)
            start = _updated_jointly(start) or start
            return isinstance(start, torch.fx.Node) and start.op == "placeholder"

        snapshots: dict[Any, torch.fx.Node] = {}
        for write in writes:
            target, source, *rest = write.args
            joint = _updated_jointly(source)
            crossed = joint in written and joint is not target
            # Writes into views of a complex tensor are calls of torch, which Inductor does not put in order.
            if source is not target and (late(source) or crossed or target.meta["val"].is_complex()):
                if source not in snapshots:
                    snapshots[source] = early(source)
                source = snapshots[source]
            write.args = (target, source, *rest)
        # Each result has memory of its own, also where two are equal to one input.
        results = torch.fx.map_arg(output.args[0], lambda one: early(one) if is_input(one) or late(one) else one)
        output.args = (results,)


def _read_early(graph: torch.fx.Graph, target: torch.fx.Node) -> None:
    """Make all readers of a complex input read a copy (`_upstream.COMPLEX_PARTS`)."""
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        copy = _recomputed(graph, target)
    for reader in list(target.users):
        if reader is not copy and (reader.target is not _COPY or reader.args[0] is not target):
            reader.replace_input_with(target, copy)


def _change_copies(graph: torch.fx.Graph, written: set[torch.fx.Node]) -> None:
    """Give operations that may work in place a copy of what they change, unless nothing else needs its values."""

    def copied(node: torch.fx.Node, value: Any) -> Any:
        with graph.inserting_before(node):
            return _recomputed(graph, value)

    for node in list(graph.nodes):
        if _may_work_in_place(node):
            base: Any = node.args[0]
            start = chain_start(base)
            if start in behind(node.args[1:]) or (start in written and not _is_new_value(node, start)):
                node.args = (copied(node, base), *node.args[1:])
        elif node.target in _FUNCTIONALIZED:
            given: list[torch.fx.Node] = []
            torch.fx.map_arg(dict(node.kwargs), given.append)
            for value in [value for value in dict.fromkeys(given) if chain_start(value) in written]:
                node.replace_input_with(value, copied(node, value))


def _may_work_in_place(node: torch.fx.Node) -> bool:
    return node.target in _IN_PLACE or str(node.target) == "_c10d_functional.all_reduce.default"


def _is_new_value(node: torch.fx.Node, target: torch.fx.Node) -> bool:
    """Return whether a result is used for nothing but the new value of an input."""
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is _COPY:
            return user.args[:2] == (target, node)
        if not _may_work_in_place(user) or user.args[0] is not node or target in behind(user.args[1:]):
            return False
        node = user
    return False


def _updated_jointly(value: Any) -> Any:
    """Return what an item of a list was before a `torch._foreach_` operation, which may work in place, else None."""
    if not isinstance(value, torch.fx.Node) or value.target is not operator.getitem:
        return None
    joint, index = value.args
    if not str(joint.target).startswith("aten._foreach_"):  # type: ignore[union-attr]
        return None
    return chain_start(joint.args[0][index])  # type: ignore[index, union-attr]


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
    why="Inductor writes new leaves back in their order, and removes copies that keep inputs and results apart",
    evidence="https://github.com/pytorch/pytorch/issues/198131; https://github.com/pytorch/pytorch/pull/198096",
    where=lambda target: target.by_inductor,
    run=_run,
    defect=True,
)
