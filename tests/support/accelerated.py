"""Tests with Accelerate, each of which begins anew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from accelerate.state import AcceleratorState, GradientState  # type: ignore[import-untyped]

from tests.support.helpers import one_thread


def forget() -> None:
    """Accelerate keeps its state in class attributes: the precision of the first Accelerator would be everyone's."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One thread, and nothing kept of Accelerate's afterwards."""
    with one_thread():
        yield
    forget()
