"""Gradients that are used while they are scaled, and scaled gradients that are taken for unscaled ones."""

from __future__ import annotations

from collections.abc import Iterator

from funcamp.report.events import (
    Cleared,
    Clipped,
    Compared,
    Ended,
    OptimizerEvent,
    StepCalled,
)
from funcamp.report.known import Condition, Gradient
from funcamp.report.lines import UNKNOWN, Line
from funcamp.report.loop import Loop
from funcamp.report.rules.rule import Found, rule


@rule(
    Clipped,
    Compared,
    OptimizerEvent,
    mistake="gradients are clipped, or compared with a bound, before unscale_",
    effect="norm and values are times the scale, so almost all is clipped, to the bound / scale after the step",
    change="scaler.unscale_(optimizer)  # before the clipping",
)
def clip_before_unscale(event: Clipped | Compared | OptimizerEvent, loop: Loop) -> Iterator[Line]:
    """Clipped or compared, and no gradient is unscaled.

    If the loop itself multiplied the gradients, it may have unscaled them. Then the mistake is certain only when the
    scaler unscales them later. If it multiplied by the scale, the bound may be times the scale too.
    """
    if isinstance(event, OptimizerEvent):
        yield from {one.clipped_line for one in _divided_now(event, loop) if one.clipped_line is not None}
        return
    conditions = loop.conditions(event.parameters)
    if Condition.SCALED in conditions and Condition.UNSCALED not in conditions and not loop.has_scale_factor:
        yield event.line


@rule(
    Cleared,
    mistake="gradients are clipped after the step that used them, and then cleared",
    effect="the clipping has no effect: the step takes gradients of any length",
    change="scaler.unscale_(optimizer); clip_grad_norm_(parameters, max_norm)  # before scaler.step(optimizer)",
)
def clip_after_step(event: Cleared, loop: Loop) -> Iterator[Line]:
    """Cleared, and only used and then clipped. Not if they were clipped before the step too: a second clip may log."""
    used = [one for one in loop.gradients_of(event.parameters) if one.condition is Condition.USED]
    yield from {gradient.late_clip_line for gradient in used if gradient.late_clip_line is not None}


@rule(
    Clipped,
    mistake="gradients of several optimizers are clipped together, and one optimizer is not unscaled",
    effect="its gradients are times the scale and dominate the norm, so the others are clipped to almost zero",
    change="scaler.unscale_(other_optimizer)  # for each optimizer, before the clipping",
)
def optimizer_not_unscaled(event: Clipped, loop: Loop) -> Iterator[Found]:
    """Clipped, and only some gradients are unscaled."""
    if loop.conditions(event.parameters) >= {Condition.SCALED, Condition.UNSCALED}:
        scaled = {one for one in event.parameters if loop.gradient(one).condition is Condition.SCALED}
        optimizers = [str(one) for one in loop.optimizers.values() if scaled.intersection(one.parameters)]
        yield Found(event.line, "; ".join(optimizers))


@rule(
    Ended,
    mistake="a norm or statistic of gradients is read on the host before unscale_",
    effect="it is times the scale: right in a ratio or a test for 0 or inf, wrong in a log or against a threshold",
    change="scaler.unscale_(optimizer)  # before the gradients are read",
    is_note=True,
)
def read_before_unscale(_event: Ended, loop: Loop) -> Iterator[Line]:
    """Computed of scaled gradients and read on the host, where it may be used for anything.

    Not if what is computed from it is free of the scale: a cosine, a sign, a step of a fixed length. Not if the loop
    multiplies or divides by the scale somewhere: it may unscale the number on the host.
    """
    if not any(scaler.is_factor for scaler in loop.scalers.values()):
        yield from loop.used_reads


@rule(
    OptimizerEvent,
    mistake="the loop divides gradients by the scale itself, and scaler.step divides them again",
    effect="scaler.step divides the gradients by the scale again: the step has almost no length",
    change="scaler.unscale_(optimizer)  # in place of the loop's own division by the scale",
)
def divided_twice(event: OptimizerEvent, loop: Loop) -> Iterator[Line]:
    """About to be divided by the scale; the loop has divided the gradients by that number, and wrote nothing since.

    It may multiply them by the scale again before the step. If it has not read the scale, the number is another one.
    """
    if event.scaler is not None and loop.scalers[event.scaler].last_read_line != UNKNOWN:
        yield from {one.divided_line for one in _divided_now(event, loop) if one.divided_line is not None}


@rule(
    OptimizerEvent,
    mistake="inf and NaN in gradients are replaced by numbers before unscale_ (nan_to_num)",
    effect="the scaler finds no overflow: it applies the replaced gradients, and the scale grows again and again",
    change="scaler.unscale_(optimizer)  # before nan_to_num: scaler.step then skips the step",
)
def overflow_replaced(event: OptimizerEvent, loop: Loop) -> Iterator[Line]:
    """About to be checked for inf and NaN, which the loop has replaced."""
    yield from {one.finite_line for one in _divided_now(event, loop) if one.finite_line is not None}


def _divided_now(event: OptimizerEvent, loop: Loop) -> list[Gradient]:
    """Return the gradients that a scaler checks and divides by its scale at an event; none if it already did."""
    if event.scaler is None or not event.has_enabled_scaler or event.optimizer in loop.scalers[event.scaler].unscaled:
        return []
    return [one for one in loop.gradients_of(event.parameters) if one.condition is not Condition.USED]


@rule(
    StepCalled,
    mistake="unscale_ is called, and another backward pass replaces the gradients before scaler.step (SAM)",
    effect="scaler.step does not unscale twice: the step is too long by the factor of the scale, and inf is not seen",
    change="scaler.update()  # before the second scaler.scale(loss).backward()",
)
def backward_after_unscale(event: StepCalled, loop: Loop) -> Iterator[Line]:
    """Stepped by a scaler that has unscaled this optimizer since its last update, and gradients are scaled again."""
    if event.scaler is None or event.optimizer not in loop.scalers[event.scaler].unscaled:
        return
    gradients = loop.gradients_of(event.parameters)
    yield from {gradient.line for gradient in gradients if gradient.condition is Condition.SCALED}


@rule(
    StepCalled,
    mistake="optimizer.step() is called on scaled gradients",
    effect="the step is too long by the factor of the scale (with Adam: epsilon means nothing), and inf is not skipped",
    change="scaler.step(optimizer); scaler.update()",
)
def optimizer_step_on_scaled(event: StepCalled, loop: Loop) -> Iterator[Line]:
    """The optimizer's own step, outside of a scaler's, and gradients are scaled."""
    if event.scaler is None and Condition.SCALED in loop.conditions(event.parameters):
        yield event.line


@rule(
    StepCalled,
    mistake="unscale_ is called, and then optimizer.step() in place of scaler.step",
    effect="inf and NaN that unscale_ has found are applied: no step is skipped",
    change="scaler.step(optimizer); scaler.update()",
)
def optimizer_step_after_unscale(event: StepCalled, loop: Loop) -> Iterator[Line]:
    """The optimizer's own step, and `unscale_` was called for it since the last update.

    Not if the loop reads a number on the host in between: it may look for inf itself.
    """
    is_unscaled = any(event.optimizer in scaler.unscaled for scaler in loop.scalers.values())
    is_second = loop.optimizers[event.optimizer].stepped_line is not None  # another mistake
    if event.scaler is None and is_unscaled and not loop.has_read_number and not is_second:
        yield event.line


@rule(
    OptimizerEvent,
    mistake="a loss is differentiated without scaler.scale before scaler.step",
    effect="its gradients are divided by the scale: that loss has almost no weight",
    change="scaler.scale(loss).backward()  # for each loss",
)
def unscaled_backward(event: OptimizerEvent, loop: Loop) -> Iterator[Line]:
    """Unscaled or stepped by a scaler, and gradients come from a loss that was not scaled, completely or in part."""
    if not event.has_enabled_scaler:
        return
    lines = set()
    for gradient in loop.gradients_of(event.parameters):
        is_plain = gradient.condition in (Condition.PLAIN, Condition.SCALED_AND_PLAIN)
        if is_plain and gradient.plain_line is not None:
            lines.add(gradient.plain_line)
    yield from lines
