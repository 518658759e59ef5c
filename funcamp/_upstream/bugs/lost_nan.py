"""Inductor makes zeros of a product with the integer 0, also of infinite and NaN factors (torch 2.11 to 2.13).

`loss + 0 * unused.sum()`, with which people keep unused parameters in the graph, then hides an overflow from the
scaler. torch corrects it in 2.14 as is done here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, fx

from funcamp import _upstream
from funcamp._upstream.bugs.bug import Bug
from funcamp._upstream.replaced import replaced


def _may_be_nan(node: fx.Node) -> bool:
    """Return whether a product with 0 may be NaN."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _changed() -> AbstractContextManager[None]:
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder

    find_zeros: Any = UniformValueConstantFolder._add_peephole_patterns

    def find_zeros_of_integers(self: Any) -> None:
        find_zeros(self)
        not_always_zero = list(filter(_may_be_nan, self.node_replacements))
        for node in not_always_zero:
            del self.node_replacements[node]
            del self.node_replacements_shapes[node]

    return replaced(UniformValueConstantFolder, _add_peephole_patterns=find_zeros_of_integers)


BUG = Bug(
    "lost_nan",
    "Inductor makes zeros of a product with the integer 0, also of factors that are not finite",
    "tests/upstream/test_upstream.py",
    _upstream.LOST_NAN,
    _changed,
)
