"""Corrections of Inductor on a CPU, for the torch versions in `_upstream`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from funcamp import _upstream


@contextlib.contextmanager
def corrected(*, exact: bool) -> Iterator[None]:
    """Context manager: Inductor keeps the order of reads and writes, errors, and with exact also the rounding.

    And its C++ takes the tensor out of a list of one.
    """
    defects = _upstream.LOST_ORDER, _upstream.UNROUNDED, _upstream.LOST_ERRORS, _upstream.LIST_OF_ONE
    if not any(defect.present for defect in defects):
        yield
        return
    from torch._inductor.codegen.cpp import CppKernel
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch._inductor.scheduler import SchedulerNode
    from torch.utils._ordered_set import OrderedSet

    recompute = SchedulerNode.recompute_size_and_body

    # LOST_ORDER: a metric or a leaf would get a new value instead of an old one.
    def keep_order(node: Any, *args: Any, **kwargs: Any) -> None:
        order = OrderedSet(dep for dep in node.read_writes.reads if isinstance(dep, (WeakDep, StarDep)))
        recompute(node, *args, **kwargs)
        if order:
            node.set_read_writes(node.read_writes.with_read(order).rename(node.mutation_renames))

    # LOST_ERRORS: a write to places that are not there would leave the tensor as it was.
    def checked(write: Any) -> Any:
        def generate(self: Any, *args: Any) -> None:
            line = self.writeline

            def checked_line(text: Any) -> None:
                is_call = isinstance(text, str) and text.startswith("aoti_torch_")
                line(f"AOTI_TORCH_ERROR_CODE_CHECK({text.rstrip(';')});" if is_call else text)

            with mock.patch.object(self, "writeline", checked_line):
                write(self, *args)

        return generate

    # LIST_OF_ONE: the list itself would be used as a tensor, which ends the process.
    call_python = CppWrapperCpu.generate_fallback_kernel_with_runtime_lookup_python

    def call_for_list(self: Any, name: str, kernel: str, operation: Any, args: Any, results: Any, *rest: Any) -> None:
        returned = operation._schema.returns
        if len(results) == 1 and len(returned) == 1 and isinstance(returned[0].type, torch.ListType):
            results = [*results, None]  # only one result is taken for a tensor; of several, None is left out
        call_python(self, name, kernel, operation, args, results, *rest)

    # UNROUNDED
    def forget(*_: Any) -> None:
        pass

    with contextlib.ExitStack() as stack:
        if _upstream.LOST_ORDER.present:
            stack.enter_context(mock.patch.object(SchedulerNode, "recompute_size_and_body", keep_order))
        if _upstream.LOST_ERRORS.present:
            for name in ("_generate_index_put_fallback", "_generate_scatter_fallback"):
                stack.enter_context(mock.patch.object(CppWrapperCpu, name, checked(getattr(CppWrapperCpu, name))))
        if _upstream.LIST_OF_ONE.present:
            stack.enter_context(mock.patch.object(CppWrapperCpu, call_python.__name__, call_for_list))
        if exact and _upstream.UNROUNDED.present:
            stack.enter_context(mock.patch.object(CppKernel, "cache_dtype_convert", forget))
        yield
