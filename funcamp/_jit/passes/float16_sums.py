"""Operations that torch sums in float16 on a CPU, number by number: compiled, they must overflow where it does.

Inductor's forms, and those of `convolutions`, sum in float32 and round once. That is nearer to the true sum, and finite
where torch's own, 60000 + 60000 - 60000, is infinite. With exact=True a program calls torch's own.

The gradient of a layer norm's weight is left as it is: a step that calls torch's own operation for it by another name
fails in generated C++ (torch 2.13).

Found by comparing fifty operations whose partial sums overflow and whose sums do not (tests/jit/test_float16_sums.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcamp._jit.passes.program import Pass
from funcamp._jit.passes.table import Decompositions
from funcamp._upstream.renamed import renamed

_aten = torch.ops.aten

#: Without a decomposition Inductor calls torch's.
_CALLED_BY_INDUCTOR = (_aten.convolution.default, _aten.convolution_backward.default)
#: Inductor has its own form of these, unless they have another name.
_DECOMPOSED_BY_INDUCTOR = (
    _aten.embedding_dense_backward.default,
    _aten.max_pool2d_with_indices_backward.default,
    _aten.scatter_add.default,
    _aten.scatter_reduce.two,
)
_RENAMED = {
    operation: renamed(f"{operation._opname}_in_float16", operation, operation) for operation in _DECOMPOSED_BY_INDUCTOR
}


def float16_sums(table: Decompositions) -> Decompositions:
    """Return the decompositions of these operations, given the table before: in float16 none."""
    former_table = dict(table)

    def decomposition_of(operation: Any) -> Callable[..., Any]:
        def decompose(*args: Any, **kwargs: Any) -> Any:
            forms = _RENAMED if _sums_in_float16(args) else former_table
            return forms[operation](*args, **kwargs) if operation in forms else NotImplemented

        return decompose

    return {operation: decomposition_of(operation) for operation in (*_CALLED_BY_INDUCTOR, *_DECOMPOSED_BY_INDUCTOR)}


def _sums_in_float16(args: tuple[Any, ...]) -> bool:
    tensor = next(value for value in args if isinstance(value, Tensor))
    return tensor.dtype == torch.float16 and tensor.device.type == "cpu"


PASS = Pass(
    name="float16_sums",
    why="with exact=True a program must overflow where torch's own float16 sums do, number by number",
    evidence="tests/jit/test_float16_sums.py",
    where=lambda target: target.by_inductor and target.exact and "cpu" in target.devices,
    run=lambda program: program.extended(float16_sums),
    defect=True,
)
