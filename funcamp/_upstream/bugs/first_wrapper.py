"""What writes the C++ between kernels is chosen by the first program that a process compiles (torch 2.11 to 2.14)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from funcamp import _upstream
from funcamp._upstream.bugs.bug import Bug
from funcamp._upstream.replaced import replaced


def _changed() -> AbstractContextManager[None]:
    from torch._inductor import config, graph
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.codegen.cpp_wrapper_cpu_array_ref import CppWrapperCpuArrayRef

    registered: Any = vars(graph)["get_wrapper_codegen_for_device"]

    def by_option(device: str, *args: Any, **kwargs: Any) -> Any:
        found = registered(device, *args, **kwargs)
        if device != "cpu" or found not in (CppWrapperCpu, CppWrapperCpuArrayRef):
            return found
        return CppWrapperCpuArrayRef if config.aot_inductor.allow_stack_allocation else CppWrapperCpu

    return replaced(graph, get_wrapper_codegen_for_device=by_option)


BUG = Bug(
    "first_wrapper",
    "what writes the C++ between kernels is chosen by the first program that a process compiles",
    "tests/jit/test_products.py",
    _upstream.FIRST_WRAPPER,
    _changed,
)
