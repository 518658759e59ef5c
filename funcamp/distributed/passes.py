"""Passes of `jit` for steps on several ranks.

Those all-gathers are dropped whose result nothing reads: torch keeps a wait for a collective even if its result is not
read, because a collective may work in place. An all-gather into a new tensor does not. All ranks must read the same
results, just as they must call the same collectives.
"""

from __future__ import annotations

from torch import fx

from funcamp._jit.passes.options import option
from funcamp._jit.passes.program import Pass, Program


def drop_unread_gathers(graph: fx.Graph) -> None:
    """Drop the all-gathers that nothing reads, and whatever else is not read then."""
    if any(_is(node, "all_gather_into_tensor.default") for node in graph.nodes):
        graph.eliminate_dead_code(lambda node: node.is_impure() and not _waits_for_gather(node))


def _waits_for_gather(node: fx.Node) -> bool:
    if not _is(node, "wait_tensor.default"):
        return False
    gathered = node.args[0]
    return isinstance(gathered, fx.Node) and _is(gathered, "all_gather_into_tensor.default")


def _is(node: fx.Node, name: str) -> bool:
    return node.op == "call_function" and str(node.target) == f"_c10d_functional.{name}"


def _run(program: Program) -> Program:
    drop_unread_gathers(program.module.graph)
    return program


PASSES: tuple[Pass, ...] = (
    Pass(
        name="unread_gathers",
        why="torch keeps an all-gather that nothing reads, such as that of a parameter which the loss leaves out",
        evidence="tests/distributed",
        where=lambda target: target.is_distributed,
        run=_run,
    ),
    option(
        {
            "reorder_for_compute_comm_overlap": True,
            "reorder_for_compute_comm_overlap_passes": ["raise_comms", "sink_waits"],
        },
        why="collectives start as soon as their inputs are ready, and are waited for as late as possible",
        evidence="tests/distributed",
        where=lambda target: target.is_distributed,
    ),
)
