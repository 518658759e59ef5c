"""Count all samples of a compiled step with one kernel, instead of some small kernels per sample.

Separate kernels make compilation several times as long, and the step of a GPT of 3.3 M take 1.19 instead of 1.07 of a
step without taps. In a trace, `count_jointly` puts one operation into the graph, without its parts. Before Inductor
decomposes the graph, `JointCounts` counts those of equal length together. A record is the same bit for bit, except for
the order of its two sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from funcamp import _upstream
from funcamp._jit.passes.graph_pass import GraphPass
from funcamp._jit.passes.program import Pass, Program
from funcamp._jit.passes.registry import register
from funcamp._trace.tracing import running
from funcamp.numerics import counting
from funcamp.numerics.counting import WIDTH, counts

_library: Any = torch.library.Library("funcamp", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("counts(Tensor[] parts) -> Tensor")
_library.impl("counts", counts, "CompositeExplicitAutograd")
_COUNTS: Any = torch.ops.funcamp.counts.default


@torch.library.register_fake(_COUNTS, lib=_library)  # type: ignore[untyped-decorator]
def _fake(parts: list[Tensor]) -> Tensor:
    return parts[0].new_empty((sum(len(part) for part in parts), WIDTH), dtype=torch.float64)


@torch.library.register_vmap(_COUNTS, lib=_library)  # type: ignore[untyped-decorator]
def _vmap(info: Any, in_dims: tuple[list[int | None]], parts: list[Tensor]) -> tuple[Tensor, int]:
    size = info.batch_size
    batched = [
        part.expand(size, *part.shape) if dim is None else part.movedim(dim, 0) for part, dim in zip(parts, in_dims[0])
    ]
    found: Tensor = _COUNTS([part.flatten(0, 1) for part in batched])
    each = torch.split(found, [size * part.shape[1] for part in batched])
    return torch.cat([rows.reshape(*part.shape[:2], WIDTH) for rows, part in zip(each, batched)], 1), 0


def count_jointly(parts: list[Tensor]) -> Tensor:
    """Count like `counts`; in a trace by one operation, which `JointCounts` replaces."""
    return counts(parts) if running() is None else _COUNTS(parts)


def _joint_counts_of(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the nodes to count together: of one dtype, device and length, none computed from another."""
    behind: dict[fx.Node, int] = {}
    groups: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        behind[node] = max((behind[before] for before in node.all_input_nodes), default=0)
        if node.target is _COUNTS:
            value = node.all_input_nodes[0].meta["val"]
            key = (behind[node], value.dtype, value.device, value.shape[1])
            groups.setdefault(key, []).append(node)
            behind[node] += 1
    return list(groups.values())


def can_count_jointly() -> bool:
    """Return whether torch has what `JointCounts` needs."""
    return _upstream.usable(
        _upstream.find("torch._inductor.custom_graph_pass.CustomGraphPass"),
        _upstream.find("torch._inductor.custom_graph_pass.get_hash_for_files"),
        _upstream.find("torch._inductor.decomposition.select_decomp_table"),
        _upstream.find("torch._inductor.pattern_matcher.stable_topological_sort"),
    )


class JointCounts(GraphPass):
    """The pass over a step's graph before Inductor's."""

    def __call__(self, graph: fx.Graph) -> None:
        """Change the graph in place."""
        groups = _joint_counts_of(graph)
        for nodes in groups:
            _count_together(graph, nodes)
        if groups:
            _upstream.find("torch._inductor.pattern_matcher.stable_topological_sort")(graph)


def _count_together(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    given: list[Any] = [node.args[0] for node in nodes]
    parts = [part for one in given for part in one]
    rows = [sum(len(part.meta["val"]) for part in one) for one in given]

    def together(*parts: Tensor) -> list[Tensor]:
        return list(torch.split(counts(list(parts)), rows))

    table = _upstream.find("torch._inductor.decomposition.select_decomp_table")()
    with parts[0].meta["val"].fake_mode:
        traced = make_fx(together, decomposition_table=table)(*[part.meta["val"] for part in parts])
    places = dict(zip(traced.graph.find_nodes(op="placeholder"), parts))
    with graph.inserting_after(nodes[-1]):
        found: Any = graph.graph_copy(traced.graph, places)
    for node, counted in zip(nodes, found):
        node.replace_all_uses_with(counted)
        graph.erase_node(node)


def _run(program: Program) -> Program:
    # The graph only names the functions of these files.
    name: bytes = _upstream.find("torch._inductor.custom_graph_pass.get_hash_for_files")((__file__, counting.__file__))
    return program._replace(options={**program.options, "joint_custom_pre_pass": JointCounts(name)})


register(
    Pass(
        name="joint_counts",
        why="all tracked samples are counted by one kernel instead of some small ones each",
        evidence="benchmarks/track.py",
        where=lambda target: target.by_inductor and can_count_jointly(),
        run=_run,
    )
)
