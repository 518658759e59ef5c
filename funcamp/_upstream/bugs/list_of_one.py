"""C++ that Inductor generates takes a list of one tensor for the tensor, and the process dies (torch 2.11 to 2.13)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from funcamp import _upstream
from funcamp._upstream.bugs.bug import Bug
from funcamp._upstream.replaced import replaced


def _changed() -> AbstractContextManager[None]:
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    name = "generate_fallback_kernel_with_runtime_lookup_python"
    call_python = getattr(CppWrapperCpu, name)

    def call_for_list(
        self: object, name: str, kernel: str, operation: Any, args: object, results: Any, *rest: Any
    ) -> None:
        returned = operation._schema.returns
        if len(results) == 1 and len(returned) == 1 and isinstance(returned[0].type, torch.ListType):
            results = [*results, None]  # only one result is taken for a tensor; of several, None is left out
        call_python(self, name, kernel, operation, args, results, *rest)

    return replaced(CppWrapperCpu, **{name: call_for_list})


BUG = Bug(
    "list_of_one",
    "C++ that Inductor generates takes a list of one tensor for the tensor, and the process dies",
    "tests/upstream/test_upstream.py",
    _upstream.LIST_OF_ONE,
    _changed,
)
