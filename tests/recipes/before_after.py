"""The example holds its own torch loop."""

from __future__ import annotations

from typing import Any

from tests.recipes import Outcome

TOLERANCE = 2.0**-12  # AdamW rounds its step size elsewhere; that moves float16 copies to their neighbours


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    params, history = recipe.before(steps, device)
    return params, [(scale, float(skipped)) for _, scale, skipped in history]
