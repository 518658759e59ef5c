"""Inductor's patterns match operations with keyword arguments that they do not name, and lose those (until 2.14).

`torch.add(a, x @ y, alpha=0.1)` becomes `a + x @ y`, and `torch.cumsum(ones, 0, dtype=...)` gets another dtype. So
running averages of products (K-FAC, Shampoo, vector-quantized codebooks) get other numbers. torch corrects it in 2.15
as is done here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import fx

from funcamp import _upstream
from funcamp._upstream.bugs.bug import Bug
from funcamp._upstream.replaced import replaced

#: Keyword arguments without which an operation computes the same numbers.
_WITHOUT_NUMBERS = ("layout", "device", "pin_memory", "memory_format")


def _has_other_keywords(node: fx.Node, named: dict[str, object]) -> bool:
    """Return whether a node has a keyword argument that a pattern does not name and that changes numbers."""
    unnamed = [name for name in node.kwargs if name not in named and name not in _WITHOUT_NUMBERS]
    if not unnamed:
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # not an operation of torch, and so not in a pattern
        return True
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    return any(node.kwargs[name] != defaults.get(name) for name in unnamed)


def _changed() -> AbstractContextManager[None]:
    from torch._inductor.pattern_matcher import FailedMatch, _TargetArgsExpr

    match: Any = _TargetArgsExpr._match

    def match_all_keywords(pattern: Any, node: object, context: object) -> object:
        if isinstance(node, fx.Node) and _has_other_keywords(node, pattern.kwargs):
            return FailedMatch("function_mismatch: node={}, pattern={}", node, pattern)
        return match(pattern, node, context)

    return replaced(_TargetArgsExpr, _match=match_all_keywords)


BUG = Bug(
    "lost_keywords",
    "Inductor's patterns lose keyword arguments that they do not name, such as alpha of torch.add(a, x @ y, alpha=c)",
    "https://github.com/pytorch/pytorch/issues/167313",
    _upstream.LOST_KEYWORDS,
    _changed,
)
