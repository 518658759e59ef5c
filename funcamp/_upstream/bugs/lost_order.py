"""Inductor loses the order of reads and writes when it fuses loops of different ranges.

It computes anew what a loop reads, and forgets two things that are not in the loop's body: that it must come after
another operation (torch 2.11), and that the memory it reads was written since by an operation that works in place
(before torch 2.15). On a CPU that is dropout's draw: the loop would read the mask before it is drawn, which is NaN.
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
        reads_and_writes = node.read_writes.with_read(order) if order else node.read_writes
        # The present name of each buffer that was written in place: without it the loop would not wait for the write.
        node.set_read_writes(reads_and_writes.rename(node.mutation_renames))

    return replaced(SchedulerNode, recompute_size_and_body=recompute_and_keep_order)


BUG = Bug(
    "lost_order",
    "Inductor loses the order of a write and a read, such as that of dropout's mask, when it fuses different loops",
    "https://github.com/pytorch/pytorch/issues/177631, https://github.com/pytorch/pytorch/issues/185509",
    _upstream.LOST_WRITES,
    _changed,
)
