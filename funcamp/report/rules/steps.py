"""Steps and updates that are missing, called twice, or in the wrong order."""

from __future__ import annotations

from collections.abc import Iterator

from funcamp.report.events import Ended, OptimizerEvent, StepCalled
from funcamp.report.known import Condition
from funcamp.report.lines import Line
from funcamp.report.loop import Loop
from funcamp.report.rules.rule import Found, rule

#: From this many on, passes, steps or cleared gradients are a pattern. Fewer may be the beginning of a window of
#: micro-batches.
_SEVERAL = 4
#: As many skipped steps in a row are no search for the scale after a step was applied: each halves the scale.
_MANY_SKIPS = 8


@rule(
    Ended,
    mistake="scaled losses are differentiated, and no step is taken",
    effect="the parameters never change",
    change="scaler.step(optimizer); scaler.update()  # after backward",
)
def scaled_backward_no_step(event: Ended, loop: Loop) -> Iterator[Line]:
    """Several scaled passes, and no step of any optimizer.

    If the auditor ended the run and no gradient was cleared, the passes may be the beginning of a window. A loop that
    unscales may apply the gradients itself.
    """
    if loop.has_unscaled or (event.is_cut and not loop.clears):
        return
    passes = sum(scaler.passes for scaler in loop.scalers.values())
    if passes >= _SEVERAL and not loop.steps and loop.last_pass is not None:
        yield loop.last_pass.line


@rule(
    StepCalled,
    mistake="optimizer.step() is called after scaler.step, with the same gradients",
    effect="each step is taken twice, and the second one applies inf and NaN that scaler.step has skipped",
    change="scaler.step(optimizer); scaler.update()  # and no optimizer.step()",
)
def stepped_twice(event: StepCalled, loop: Loop) -> Iterator[Line]:
    """The optimizer's own step; an enabled scaler stepped it before, and its gradients are those of that step."""
    if event.scaler is None and loop.optimizers[event.optimizer].stepped_line is not None:
        yield event.line


@rule(
    OptimizerEvent,
    mistake="scaler.update is called between backward and step (between the steps of two optimizers)",
    effect="gradients are divided by another scale than theirs, and those that unscale_ has divided a second time",
    change="scaler.update()  # once, after the steps of all optimizers",
)
def update_between_steps(event: OptimizerEvent, loop: Loop) -> Iterator[Line]:
    """Unscaled or stepped by a scaler, and gradients were scaled before that scaler's last update.

    Also if it had unscaled them: after the update it divides them again.
    """
    if not event.has_enabled_scaler:
        return
    for gradient in loop.gradients_of(event.parameters):
        is_of_scaler = gradient.condition is Condition.SCALED or (
            gradient.condition is Condition.UNSCALED and gradient.scaler == event.scaler and not gradient.is_written
        )
        if is_of_scaler and gradient.updates != loop.updates_of(gradient.scaler):
            yield event.line
            return


@rule(
    Ended,
    mistake="an optimizer gets gradients and is never stepped",
    effect="its parameters never change",
    change="scaler.step(other_optimizer)  # for each optimizer, before scaler.update",
)
def optimizer_not_stepped(event: Ended, loop: Loop) -> Iterator[Found]:
    """Never stepped, although several passes reached it while others were stepped.

    Not if another optimizer steps its parameters, which it then wraps. If the auditor ended the run, it may be stepped
    later: it must have cleared its gradients several times, and have a loss of its own (a generator's loss goes through
    the discriminator).
    """
    optimizers = loop.optimizers.values()
    stepped = {parameter for optimizer in optimizers if optimizer.steps for parameter in optimizer.parameters}
    for optimizer in optimizers:
        is_idle = loop.steps >= _SEVERAL and optimizer.passes >= _SEVERAL and stepped.isdisjoint(optimizer.parameters)
        is_certain = not event.is_cut or (optimizer.clears >= _SEVERAL and optimizer.has_own_passes)
        if is_idle and is_certain and optimizer.last_pass is not None:
            yield Found(optimizer.last_pass.line, str(optimizer))


@rule(
    StepCalled,
    mistake="zero_grad is called between backward and step",
    effect="the step gets no gradients: the parameters never change (torch raises if the gradients are None)",
    change="optimizer.zero_grad()  # before backward, or after the step",
)
def cleared_before_step(event: StepCalled, loop: Loop) -> Iterator[Line]:
    """Stepped without a gradient, after the gradients of a backward pass were cleared, and so at every step before.

    Later it may be how a loop skips a step.
    """
    optimizer = loop.optimizers[event.optimizer]
    is_usual = optimizer.empty_steps == optimizer.steps
    if optimizer.cleared_line is not None and is_usual and not loop.gradients_of(event.parameters):
        yield optimizer.cleared_line


@rule(
    Ended,
    mistake="every later step is skipped: its gradients are inf or NaN at any scale, such as those of a root of 0",
    effect="the parameters no longer change, and the scale falls to zero",
    change="(x.float().square().sum(1) + 1e-6).sqrt()  # no root, norm, logarithm or division of 0",
)
def each_step_skipped(_event: Ended, loop: Loop) -> Iterator[Found]:
    """The last steps of an optimizer were skipped, and the scale fell.

    Not if the first scale may still be too high: then a step was applied before, or the scale is below 1. Not if an
    operation of the forward pass was named.
    """
    for optimizer in loop.optimizers.values():
        skips = optimizer.skips
        if len(skips) < _MANY_SKIPS or loop.has_named_overflow or optimizer.last_pass is None:
            continue
        first, last = skips[0].scale, skips[-1].scale
        if last < first and (optimizer.applied or last < 1):
            detail = f"the last {len(skips)} steps; the scale fell from {first:g} to {last:g}"
            yield Found(optimizer.last_pass.line, detail)
