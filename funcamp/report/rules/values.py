"""Numbers outside of float16's range, and numbers that are not finite."""

from __future__ import annotations

from collections.abc import Iterator

from funcamp.report.events import Backward, ConstantUsed
from funcamp.report.lines import Line
from funcamp.report.loop import Loop
from funcamp.report.rules.rule import Found, rule


@rule(
    ConstantUsed,
    mistake="a float16 tensor meets a constant beyond 65504, such as a mask of -1e9",
    effect="the constant is inf in float16: a row that is masked completely becomes NaN (or torch raises)",
    change="torch.finfo(scores.dtype).min  # in place of the constant, or scores.float()",
)
def constant_beyond_float16(event: ConstantUsed, _loop: Loop) -> Iterator[Line]:
    """The constant is too large for float16, not too small."""
    if abs(event.value) > 1:
        yield event.line


@rule(
    ConstantUsed,
    mistake="an epsilon below 3e-8 is added to a float16 tensor, or bounds it",
    effect="the epsilon is zero in float16: a division by it makes inf and NaN",
    change="x.float() + epsilon  # and in float32 what follows it, up to the division",
)
def epsilon_below_float16(event: ConstantUsed, _loop: Loop) -> Iterator[Line]:
    """The constant is too small for float16, not too large."""
    if abs(event.value) < 1:
        yield event.line


@rule(
    Backward,
    mistake="a float16 operation makes inf or NaN: a sum, a product, a loss, a division by an epsilon that is zero",
    effect="the loss is inf or NaN at every scale: each step is skipped, and the scale falls to zero",
    change="x.float()  # before the operation",
)
def float16_overflow(event: Backward, loop: Loop) -> Iterator[Found]:
    """The loss is not finite, and an operation of its forward pass was the last one to make that of finite numbers.

    With a finite loss it was meant, as a mask is.
    """
    if event.not_finite == "loss" and loop.overflow is not None:
        yield Found(loop.overflow.line, loop.overflow.detail)


@rule(
    Backward,
    mistake="the loss, or a parameter, is not finite from the start",
    effect="each step is skipped, or the first one makes every parameter NaN; no scale helps",
    change="check the initialization, the checkpoint and the first batch: torch.isfinite(parameter).all()",
)
def not_finite_from_start(event: Backward, loop: Loop) -> Iterator[Line]:
    """The first backward pass, and no float16 operation that is named was out of range before."""
    if loop.last_pass is None and event.not_finite and not loop.explains(event):
        yield event.line
