"""Count all samples of a compiled step with one kernel, instead of some small kernels per sample.

With separate kernels compilation takes several times as long, and a step of a GPT of 3.3 M takes 1.19 times as long as
without taps, instead of 1.07 times. In a trace, `count_jointly` puts one operation into the graph, without its parts.
Before Inductor decomposes the graph, `JointCounts` counts those of equal length together. A record is the same bit for
bit, except for the order of its two sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from funcamp import _upstream
from funcamp._jit.passes.graph_pass import GraphPass
from funcamp._jit.passes.program import Pass, Program
from funcamp._jit.passes.table import Table
from funcamp._layers import register_passes
from funcamp._trace.tracing import running
from funcamp.numerics.counting import WIDTH, counts

_library: Any = torch.library.Library("funcamp", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("counts(Tensor[] parts) -> Tensor")
_library.impl("counts", counts, "CompositeExplicitAutograd")
_COUNTS: Any = torch.ops.funcamp.counts.default


@torch.library.register_fake(_COUNTS, lib=_library)  # type: ignore[untyped-decorator]
def _fake(parts: list[Tensor]) -> Tensor:
    """Return a tensor like the rows of all parts."""
    return parts[0].new_empty((sum(len(part) for part in parts), WIDTH), dtype=torch.float64)


def count_jointly(parts: list[Tensor]) -> Tensor:
    """Count like `counts`; in a trace by one operation, which `JointCounts` replaces, but not under torch.func."""
    is_joint = running() is not None and not _upstream.transforms_active()
    return _COUNTS(parts) if is_joint else counts(parts)


def _group_counts(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the nodes to count together: of one dtype, device and length, none computed from another."""
    counts_before: dict[fx.Node, int] = {}  # the largest number of counting nodes on a path to each node
    groups: dict[tuple[int, torch.dtype, torch.device, int], list[fx.Node]] = {}
    for node in graph.nodes:
        counts_before[node] = max((counts_before[source] for source in node.all_input_nodes), default=0)
        if node.target is _COUNTS:
            numbers = node.all_input_nodes[0].meta["val"]
            key = (counts_before[node], numbers.dtype, numbers.device, numbers.shape[1])
            groups.setdefault(key, []).append(node)
            counts_before[node] += 1
    return list(groups.values())


def can_count_jointly() -> bool:
    """Return whether torch has what `JointCounts` needs."""
    return _upstream.usable(
        _upstream.find("torch._inductor.custom_graph_pass.CustomGraphPass"),
        _upstream.find("torch._inductor.pattern_matcher.stable_topological_sort"),
    )


class JointCounts(GraphPass):
    """The pass over a step's graph before Inductor's.

    Args:
        name: the name in Inductor's cache.
        table: what the compiler takes instead of some operations.
    """

    def __init__(self, name: bytes, table: Table) -> None:
        super().__init__(name)
        self._table = table

    def __call__(self, graph: fx.Graph) -> None:
        """Change the graph in place."""
        groups = _group_counts(graph)
        for nodes in groups:
            _count_together(graph, nodes, self._table)
        if groups:  # the users of a group's first nodes stand before the joint count
            _upstream.find("torch._inductor.pattern_matcher.stable_topological_sort")(graph)


def _count_together(graph: fx.Graph, nodes: list[fx.Node], table: Table) -> None:
    """Replace the counts of a group by one count of all their parts, which is split again."""
    all_parts: list[fx.Node] = []
    rows_by_node: list[int] = []
    for node in nodes:
        parts: Any = node.args[0]
        all_parts += parts
        rows_by_node.append(sum(len(part.meta["val"]) for part in parts))
    fake_parts = [part.meta["val"] for part in all_parts]

    def count_and_split(*parts: Tensor) -> list[Tensor]:
        return list(torch.split(counts(list(parts)), rows_by_node))

    with fake_parts[0].fake_mode:
        traced = make_fx(count_and_split, decomposition_table=table)(*fake_parts)
    placeholders = traced.graph.find_nodes(op="placeholder")
    with graph.inserting_after(nodes[-1]):
        joint_counts: Any = graph.graph_copy(traced.graph, dict(zip(placeholders, all_parts)))
    for node, joint_count in zip(nodes, joint_counts):
        node.replace_all_uses_with(joint_count)
        graph.erase_node(node)


def _run(program: Program) -> Program:
    joint_counts = JointCounts(program.cache_name, program.table)
    return program._replace(options={**program.options, "joint_custom_pre_pass": joint_counts})


PASSES = (
    Pass(
        name="joint_counts",
        why="all tracked samples are counted by one kernel instead of some small ones each",
        evidence="benchmarks/track.py",
        where=lambda target: target.by_inductor and can_count_jointly(),
        run=_run,
    ),
)
register_passes("numerics.counting_pass")
