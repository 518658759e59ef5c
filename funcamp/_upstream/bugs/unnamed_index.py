"""C++ that Inductor generates names no operation in the error of an index out of range (torch 2.11 on).

"index out of bounds: 0 <= tmp3 < 10" becomes "aten.embedding.default: index out of bounds: 0 <= tmp3 < 10".
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx

from funcamp import _upstream
from funcamp._upstream.bugs.bug import Bug
from funcamp._upstream.replaced import replaced


def _reads_integers(operation: fx.Node) -> bool:
    values = [node.meta.get("val") for node in operation.all_input_nodes]
    return any(isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64) for value in values)


def _names(computed: Any) -> str:
    """Return the names of the operations on integers that a loop of a kernel computes."""
    operations = computed.node.get_origins() if computed is not None else ()
    return ", ".join(sorted({str(one.target) for one in operations if _reads_integers(one)}))


def _changed() -> AbstractContextManager[None]:
    from torch._inductor.codegen.cpp import CppKernel

    check: Any = CppKernel.check_bounds

    def check_with_names(kernel: Any, *args: object) -> None:
        check_index = kernel.indirect_assert

        def check_index_with_names(*args: object) -> str:
            line: str = check_index(*args)
            names = _names(kernel.current_node)
            return line.replace('"index', f'"{names}: index') if names else line

        with replaced(kernel, indirect_assert=check_index_with_names):
            check(kernel, *args)

    return replaced(CppKernel, check_bounds=check_with_names)


BUG = Bug(
    "unnamed_index",
    "C++ that Inductor generates names no operation in the error of an index out of range",
    "tests/jit/test_jit.py",
    _upstream.UNNAMED_INDEX,
    _changed,
)
