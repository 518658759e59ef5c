"""Scalers: created again and again, disabled, missing or unnecessary; how a loop uses their scale."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from funcamp.report.events import Ended, LossScaled, OptimizerEvent, StepCalled
from funcamp.report.known import Condition
from funcamp.report.lines import UNKNOWN, Line
from funcamp.report.loop import Loop
from funcamp.report.rules.rule import rule

#: From this many reads on, a line reads the scale regularly.
_REGULAR_READS = 4


def _forward_dtypes(event: StepCalled, loop: Loop) -> set[torch.dtype]:
    """Return the 16-bit dtypes of the forward passes that led to the gradients of a step."""
    return {dtype for gradient in loop.gradients_of(event.parameters) for dtype in gradient.dtypes}


@rule(
    StepCalled,
    mistake="a new scaler is made in each iteration",
    effect="the scale starts over each time: it never grows, and an overflow is repeated until a person lowers it",
    change="scaler = torch.amp.GradScaler(device)  # once, before the loop",
)
def scaler_made_in_loop(event: StepCalled, loop: Loop) -> Iterator[Line]:
    """Stepped by another scaler than last time, which the same call created, called by the same calls.

    Not if the optimizer's state was loaded meanwhile: another training begins, such as that of another fold.
    """
    optimizer = loop.optimizers[event.optimizer]
    if event.scaler is None or optimizer.scaler in (None, event.scaler) or optimizer.is_restored:
        return
    scaler, previous_scaler = loop.scalers[event.scaler], loop.scalers[optimizer.scaler]
    if scaler.made_line != UNKNOWN and scaler.made_at == previous_scaler.made_at:
        yield scaler.made_line


@rule(
    StepCalled,
    mistake="the scaler is disabled, and float16 runs",
    effect="small gradients become zero in float16, and a step with inf or NaN is applied",
    change='scaler = torch.amp.GradScaler(device)  # enabled, on the device of the loss (the default is "cuda")',
)
def scaler_disabled(event: StepCalled, loop: Loop) -> Iterator[Line]:
    """Stepped by a disabled scaler, and float16 ran."""
    if event.scaler is not None and not event.has_enabled_scaler and torch.float16 in _forward_dtypes(event, loop):
        yield event.line


@rule(
    StepCalled,
    mistake="float16 runs without a scaler",
    effect="small gradients become zero in float16, and a step with inf or NaN is applied",
    change="scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()  # or bfloat16",
)
def float16_without_scaler(event: StepCalled, loop: Loop) -> Iterator[Line]:
    """Stepped without a scaler, with gradients of float16 forward passes whose loss was not scaled."""
    if event.scaler is not None or Condition.PLAIN not in loop.conditions(event.parameters):
        return
    if torch.float16 in _forward_dtypes(event, loop):
        yield event.line


@rule(
    StepCalled,
    mistake="a scaler is used, and only bfloat16 runs",
    effect="harmless: bfloat16 has the range of float32 and needs no scale; the scaler costs time",
    change="loss.backward(); optimizer.step()  # or GradScaler(enabled=False)",
    is_note=True,
)
def scaler_with_bfloat16(event: StepCalled, loop: Loop) -> Iterator[Line]:
    """Stepped by a scaler, and bfloat16 is the only 16-bit dtype that ran."""
    if event.has_enabled_scaler and _forward_dtypes(event, loop) == {torch.bfloat16}:
        yield event.line


@rule(
    StepCalled,
    mistake="the forward pass runs outside of autocast, and the backward pass inside",
    effect="the model runs in float32, as slowly as without autocast; torch advises against backward under autocast",
    change="with torch.autocast(device, torch.float16):  # around the forward pass and the loss only",
)
def backward_in_autocast(event: StepCalled, loop: Loop) -> Iterator[Line]:
    """Stepped after a backward pass under autocast, and no operation of the forward passes ran in 16 bits."""
    if not _forward_dtypes(event, loop):
        window = loop.optimizers[event.optimizer].window
        yield from {one.line for one in window if one.is_in_autocast and one.has_products}


@rule(
    LossScaled,
    mistake="a loss is scaled twice",
    effect="the gradients are times the square of the scale, and unscale_ divides by it once",
    change="scaler.scale(loss).backward()  # once",
)
def scaled_twice(event: LossScaled, _loop: Loop) -> Iterator[Line]:
    """The loss was scaled before."""
    if event.is_scaled:
        yield event.line


@rule(
    LossScaled,
    mistake="a penalty on gradients of a scaled loss (torch.autograd.grad) is part of a loss that is scaled again",
    effect="the penalty grows with the scale: its weight is much too large, and changes whenever the scale changes",
    change="gradients = [g / scaler.get_scale() for g in gradients]  # before the penalty is computed",
)
def penalty_on_scaled(event: LossScaled, loop: Loop) -> Iterator[Line]:
    """Computed from scaled gradients. Not if the loop divides by the scale: it may have unscaled them."""
    if event.grows_with_scale and not loop.has_scale_factor:
        yield event.line


@rule(
    Ended,
    mistake="a scaled loss is read on the host, and not divided by the scale",
    effect="the logged loss is times the scale: it jumps whenever the scale changes",
    change="logged = loss.item()  # of the loss before scaler.scale",
)
def scaled_loss_read(_event: Ended, loop: Loop) -> Iterator[Line]:
    """Read several times by one line, and the loop never multiplies or divides by the scale."""
    for scaler in loop.scalers.values():
        if not scaler.is_factor:
            yield from [line for line, reads in scaler.loss_lines.items() if reads >= _REGULAR_READS]


@rule(
    OptimizerEvent,
    mistake="a loss is scaled by one scaler, and the gradients are unscaled by another",
    effect="the gradients are wrong by the factor between the two scales",
    change="scaler.step(optimizer)  # of the scaler that scaled the loss",
)
def unscaled_by_another(event: OptimizerEvent, loop: Loop) -> Iterator[Line]:
    """Unscaled or stepped by a scaler, and all gradients are times the scale of another one."""
    scaled = [one for one in loop.gradients_of(event.parameters) if one.condition is Condition.SCALED]
    if event.has_enabled_scaler and scaled and all(one.scaler != event.scaler for one in scaled):
        yield event.line
