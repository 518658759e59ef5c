"""Tests with Accelerate, each of which begins anew."""

from __future__ import annotations

from accelerate.state import AcceleratorState, GradientState  # type: ignore[import-untyped]


def forget() -> None:
    """Accelerate keeps its state in class attributes: the precision of the first Accelerator would be everyone's."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
