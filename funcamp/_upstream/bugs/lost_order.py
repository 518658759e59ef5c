"""Inductor loses the order of a write after a read when it fuses loops of different ranges (torch 2.11).

A metric, or a leaf of the state, would get a new value instead of an old one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from funcamp import _upstream
from funcamp._upstream.bugs.bug import Bug
from funcamp._upstream.replaced import replaced


def _changed() -> AbstractContextManager[None]:
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch._inductor.scheduler import SchedulerNode
    from torch.utils._ordered_set import OrderedSet

    recompute = SchedulerNode.recompute_size_and_body

    def recompute_and_keep_order(node: Any, *args: Any, **kwargs: Any) -> None:
        # Dependencies without an index. The call computes all anew from the loop's body, and would drop these.
        order = OrderedSet(dep for dep in node.read_writes.reads if isinstance(dep, (WeakDep, StarDep)))
        recompute(node, *args, **kwargs)
        if order:
            reads_and_writes = node.read_writes.with_read(order)
            node.set_read_writes(reads_and_writes.rename(node.mutation_renames))

    return replaced(SchedulerNode, recompute_size_and_body=recompute_and_keep_order)


BUG = Bug(
    "lost_order",
    "Inductor loses the order of a write after a read when it fuses loops of different ranges",
    "https://github.com/pytorch/pytorch/issues/177631",
    _upstream.LOST_ORDER,
    _changed,
)
