"""Corrections of Inductor's rewrites of a graph, for the torch versions in `_upstream`.

Two of its rewrites change numbers without a word:

- A pattern matches an operation with keyword arguments that the pattern does not name, and the replacement loses them:
  `torch.add(a, x @ y, alpha=0.1)` becomes `a + x @ y`, and `torch.cumsum(ones, 0, dtype=...)` gets another dtype. So
  running averages of products (K-FAC, Shampoo, vector-quantized codebooks) get other numbers.
- A product with the integer 0 becomes zeros, also if the other factor is infinite or NaN. `loss + 0 * unused.sum()`,
  with which people keep unused parameters in the graph, then hides an overflow from the scaler.

torch corrects both as is done here, where the rewrites look for their matches: the products in 2.14, the patterns in
2.15.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import Tensor, fx

from funcamp import _upstream

#: Keyword arguments without which an operation computes the same numbers.
_WITHOUT_NUMBERS = ("layout", "device", "pin_memory", "memory_format")


@contextlib.contextmanager
def faithful_rewrites() -> Iterator[None]:
    """Context manager: Inductor's rewrites keep keyword arguments, and products with 0 that are not finite."""
    with contextlib.ExitStack() as stack:
        if _upstream.LOST_KEYWORDS.present:
            from torch._inductor.pattern_matcher import FailedMatch, _TargetArgsExpr

            match: Any = _TargetArgsExpr._match

            def match_all_keywords(pattern: Any, node: Any, context: Any) -> Any:
                if isinstance(node, fx.Node) and _has_other_keywords(node, pattern.kwargs):
                    return FailedMatch("function_mismatch: node={}, pattern={}", node, pattern)
                return match(pattern, node, context)

            stack.enter_context(mock.patch.object(_TargetArgsExpr, "_match", match_all_keywords))
        if _upstream.LOST_NAN.present:
            from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder

            find_zeros: Any = UniformValueConstantFolder._add_peephole_patterns

            def find_integer_zeros(self: Any) -> None:
                find_zeros(self)
                for node in [node for node in self.node_replacements if _may_be_nan(node)]:
                    del self.node_replacements[node], self.node_replacements_shapes[node]

            stack.enter_context(
                mock.patch.object(UniformValueConstantFolder, "_add_peephole_patterns", find_integer_zeros)
            )
        yield


def _has_other_keywords(node: fx.Node, named: dict[str, Any]) -> bool:
    """Return whether a node has a keyword argument that a pattern does not name and that changes numbers."""
    others = [name for name in node.kwargs if name not in named and name not in _WITHOUT_NUMBERS]
    if not others:
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # not an operation of torch, and so not in a pattern
        return True
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    return any(node.kwargs[name] != defaults.get(name) for name in others)


def _may_be_nan(node: fx.Node) -> bool:
    """Return whether a product with 0 may be NaN."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
