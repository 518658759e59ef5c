"""C++ that Inductor generates declares the 16-bit copy of a sum once for each tensor that it is stored in (2.11 on).

The biases of `a(x) + b(t)` have one gradient, a sum over rows: the program is refused by the C++ compiler. Each store
gets a block, so that its copy is declared in there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from funcamp import _upstream
from funcamp._upstream.bugs.bug import Bug
from funcamp._upstream.replaced import replaced


def _changed() -> AbstractContextManager[None]:
    from torch._inductor.codegen.cpp import CppVecKernel
    from torch._inductor.utils import IndentedBuffer

    store: Any = CppVecKernel.store_reduction

    def store_in_block(kernel: Any, *args: object) -> None:
        lines_before = kernel.reduction_suffix
        with replaced(kernel, reduction_suffix=IndentedBuffer()):
            store(kernel, *args)
            lines_of_store = kernel.reduction_suffix
        lines_before.writeline("{")
        lines_before.splice(lines_of_store)
        lines_before.writeline("}")

    return replaced(CppVecKernel, store_reduction=store_in_block)


BUG = Bug(
    "declared_twice",
    "C++ that Inductor generates declares the 16-bit copy of a sum once for each tensor that it is stored in",
    "https://github.com/pytorch/pytorch/issues/194706",
    _upstream.DECLARED_TWICE,
    _changed,
)
