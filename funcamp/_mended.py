"""Mends of Inductor on a CPU, for torch before 2.13. tests/test_upstream.py tells when each can go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch.torch_version import __version__

NEEDED = str(__version__) < "2.13"


@contextlib.contextmanager
def mended(*, exact: bool) -> Iterator[None]:
    """A region in which Inductor compiles a step right: the order of reads and writes, with exact its rounding too."""
    if not NEEDED:
        yield
        return
    from torch._inductor.codegen.cpp import CppKernel
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch._inductor.scheduler import SchedulerNode
    from torch.utils._ordered_set import OrderedSet

    recompute = SchedulerNode.recompute_size_and_body

    # Fusing loops of other ranges forgets that a write must come after the reads of what was there before
    # (https://github.com/pytorch/pytorch/issues/177631): a metric or a leaf gets a new value for an old one.
    def keep_order(node: Any, *args: Any, **kwargs: Any) -> None:
        order = OrderedSet(dep for dep in node.read_writes.reads if isinstance(dep, (WeakDep, StarDep)))
        recompute(node, *args, **kwargs)
        if order:
            node.set_read_writes(node.read_writes.with_read(order).rename(node.mutation_renames))

    # A rounded value is read back unrounded, whatever emulate_precision_casts says
    # (https://github.com/pytorch/pytorch/issues/185337).
    def forget(*_: Any) -> None:
        pass

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(SchedulerNode, "recompute_size_and_body", keep_order))
        if exact:
            stack.enter_context(mock.patch.object(CppKernel, "cache_dtype_convert", forget))
        yield
