"""A step executed as the GPU's program, against the step run eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from funcamp import jit
from tests.support.gpu_program import on_gpu
from tests.support.helpers import assert_close, assert_same

#: What of a step's metrics is decided by whether a number overflowed.
DECIDED = ("scale", "found_inf", "exhausted", "saturated", "applied", "skipped", "consecutive_skips")


def assert_follows_eager(
    step: Any, batch: Callable[[int], Any], tolerance: float, steps: int, *, exact: bool = True, flat: bool = True
) -> None:
    """Run both; what overflows decide must be equal bit for bit at every step, the rest close."""
    program, flags = jit(step, exact=exact), []
    state, gpu = step.init(flat=flat), step.init(flat=flat)
    with on_gpu():
        for number in range(steps):
            state, expected = step(state, batch(number))
            gpu, metrics = program(gpu, batch(number))
            assert_same(gpu.scaler, state.scaler)
            for name in DECIDED:
                assert_same(getattr(metrics, name), getattr(expected, name))
            assert_close(metrics.loss, expected.loss, tolerance)
            flags.append(expected.found_inf.item())
    assert_same((gpu.step, gpu.skipped, gpu.consecutive_skips), (state.step, state.skipped, state.consecutive_skips))
    assert_close((gpu.params, gpu.ema, gpu.buffers), (state.params, state.ema, state.buffers), tolerance)
    assert_close(gpu.opt_state, state.opt_state, 5 * tolerance)
    assert flags.count(1.0) >= 2, flags
    assert flags.count(0.0) >= 2, flags
