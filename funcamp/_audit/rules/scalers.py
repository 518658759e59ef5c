"""Scalers: made anew, disabled, missing, unnecessary; their scale, read and divided by."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from funcamp._audit.events import Backward, Ended, OfOptimizer, ScaledLossRead, ScaleRead, StepCalled
from funcamp._audit.lines import UNKNOWN, Line
from funcamp._audit.loop import Condition, Loop
from funcamp._audit.rules.rule import rule

#: Reads of the scale that are a habit.
_READS = 4


def _dtypes(event: StepCalled, loop: Loop) -> set[torch.dtype]:
    """Return the dtypes of 16 bits behind the gradients of a step."""
    return {dtype for gradient in loop.present(event.parameters) for dtype in gradient.dtypes}


@rule(
    StepCalled,
    mistake="a new scaler is made in each iteration",
    effect="the scale starts over each time: it never grows, and an overflow is repeated until a person lowers it",
    change="scaler = torch.amp.GradScaler(device)  # once, before the loop",
)
def scaler_made_in_loop(event: StepCalled, loop: Loop) -> Iterator[Line]:
    """Stepped by another scaler than before, which the same line made."""
    before = loop.optimizer(event.optimizer).scaler
    if event.scaler is None or before is None or before == event.scaler:
        return
    made = loop.scaler(event.scaler).made
    if made != UNKNOWN and made == loop.scaler(before).made:
        yield made


@rule(
    StepCalled,
    mistake="the scaler is disabled, and float16 runs",
    effect="small gradients become zero in float16, and a step with inf or NaN is applied",
    change='scaler = torch.amp.GradScaler(device)  # enabled, on the device of the loss (the default is "cuda")',
)
def scaler_disabled(event: StepCalled, loop: Loop) -> Iterator[Line]:
    """Stepped by a disabled scaler, and float16 ran."""
    if event.scaler is not None and not event.enabled and torch.float16 in _dtypes(event, loop):
        yield event.line


@rule(
    StepCalled,
    mistake="float16 runs without a scaler",
    effect="small gradients become zero in float16, and a step with inf or NaN is applied",
    change="scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()  # or bfloat16",
)
def float16_without_scaler(event: StepCalled, loop: Loop) -> Iterator[Line]:
    """Stepped without a scaler, on gradients of a float16 loss that nothing scaled."""
    if event.scaler is not None or Condition.PLAIN not in loop.conditions(event.parameters):
        return
    if torch.float16 in _dtypes(event, loop):
        yield event.line


@rule(
    StepCalled,
    mistake="a scaler is used, and only bfloat16 runs",
    effect="harmless: bfloat16 has the range of float32 and needs no scale; the scaler costs time",
    change="loss.backward(); optimizer.step()  # or GradScaler(enabled=False)",
    is_note=True,
)
def scaler_with_bfloat16(event: StepCalled, loop: Loop) -> Iterator[Line]:
    """Stepped by a scaler, and bfloat16 ran and float16 did not."""
    if event.scaler is not None and event.enabled and _dtypes(event, loop) == {torch.bfloat16}:
        yield event.line


@rule(
    OfOptimizer,
    mistake="the model is cast to float16 and trained with a scaler",
    effect="torch raises ValueError (Attempting to unscale FP16 gradients); float16 weights lose small steps",
    change="with torch.autocast(device, torch.float16):  # and no model.half()",
)
def model_half_with_scaler(event: OfOptimizer, loop: Loop) -> Iterator[Line]:
    """Unscaled or stepped by a scaler that refuses float16 gradients, and some are."""
    if event.scaler is not None and event.enabled and event.has_refused_float16:
        lines = [loop.halved[parameter] for parameter in event.parameters if parameter in loop.halved]
        yield lines[0] if lines else event.line


@rule(
    Backward,
    mistake="the forward pass runs outside of autocast, and the backward pass inside",
    effect="the model runs in float32, as slowly as without autocast; torch advises against backward under autocast",
    change="with torch.autocast(device, torch.float16):  # around the forward pass and the loss only",
)
def backward_in_autocast(event: Backward, _loop: Loop) -> Iterator[Line]:
    """Backward under autocast, of a loss without operations of 16 bits."""
    if event.autocast_dtype is not None and not event.dtypes:
        yield event.line


@rule(
    ScaleRead,
    ScaledLossRead,
    mistake="a scaled loss is divided by the scale after the update",
    effect="the scale may have changed: the logged loss jumps by its factor",
    change="logged = loss.item()  # of the loss before scaler.scale",
)
def loss_over_updated_scale(event: ScaleRead | ScaledLossRead, loop: Loop) -> Iterator[Line]:
    """A stale scaled loss and the scale are read on one line."""
    if isinstance(event, ScaledLossRead):
        scale_line = loop.scaler(event.scaler).last_read
        loss_line = event.line if event.updates != loop.updates_of(event.scaler) else UNKNOWN
    else:
        scale_line = event.line
        loss_line = loop.stale_loss_read
    if loss_line != UNKNOWN and scale_line == loss_line:
        yield event.line


@rule(
    Ended,
    mistake="the scale is read in each iteration",
    effect="get_scale waits for the device each time, so that Python no longer runs ahead of it",
    change="if step % 100 == 0: log(scaler.get_scale())",
    is_note=True,
)
def scale_read_each_step(_event: Ended, loop: Loop) -> Iterator[Line]:
    """Read by one line of the user's own about as often as updated.

    Not two lines, which compare the scale before and after the update, also if the first is before the loop;
    nor a loop that unscales gradients by hand.
    """
    for scaler in loop.scalers.values():
        enough = max(_READS, 0.9 * scaler.updates)
        lines = [line for line, reads in scaler.reads.items() if reads >= enough]
        if len(lines) == 1 and not lines[0].is_installed and not scaler.taken and not scaler.is_compared:
            yield lines[0]
