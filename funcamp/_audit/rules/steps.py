"""Steps and updates: left out, called twice, in the wrong order."""

from __future__ import annotations

from collections.abc import Iterator

from funcamp._audit.events import Ended, OfOptimizer, SchedulerStepped, StepCalled, Updated
from funcamp._audit.lines import Line
from funcamp._audit.loop import Condition, Loop
from funcamp._audit.rules.rule import rule

#: So many passes without a step are a mistake, and fewer may be the begin of a window.
_PASSES = 4


@rule(
    Ended,
    mistake="scaled losses are differentiated, and no step is taken",
    effect="the parameters never change",
    change="scaler.step(optimizer); scaler.update()  # after backward",
)
def scaled_backward_no_step(event: Ended, loop: Loop) -> Iterator[Line]:
    """Several scaled passes, and no step of any optimizer; if the run was cut, they may be the begin of a window."""
    if event.is_cut and not loop.clears:
        return
    passes = sum(scaler.passes for scaler in loop.scalers.values())
    if passes >= _PASSES and not loop.steps and loop.last_pass is not None:
        yield loop.last_pass.line


@rule(
    StepCalled,
    mistake="scaler.step is called again without scaler.update between",
    effect="torch raises RuntimeError at the second step; the scale never changes",
    change="scaler.update()  # once, after the steps of an iteration",
)
def step_without_update(event: StepCalled, loop: Loop) -> Iterator[Line]:
    """Stepped by a scaler that has stepped this optimizer since its last update."""
    if event.scaler is not None and event.optimizer in loop.scaler(event.scaler).stepped:
        yield event.line


@rule(
    Updated,
    mistake="scaler.update is called twice in an iteration",
    effect="torch raises AssertionError",
    change="scaler.update()  # once, after the last scaler.step of an iteration",
)
def update_twice(event: Updated, loop: Loop) -> Iterator[Line]:
    """Updated without any check of gradients since the last update, and no other scaler waits for its update."""
    if _updates_nothing(event, loop) and not _others_wait(event, loop):
        yield event.line


@rule(
    Updated,
    mistake="another scaler is updated than the one that took the step",
    effect="torch raises AssertionError, or the scale of the one that took the step never changes",
    change="scaler.update()  # of the scaler that took the step",
)
def update_of_another_scaler(event: Updated, loop: Loop) -> Iterator[Line]:
    """Updated without any check of gradients, and another scaler waits for its update."""
    if _updates_nothing(event, loop) and _others_wait(event, loop):
        yield event.line


def _updates_nothing(event: Updated, loop: Loop) -> bool:
    scaler = loop.scaler(event.scaler)
    return event.enabled and not event.sets_scale and not (scaler.unscaled or scaler.stepped)


def _others_wait(event: Updated, loop: Loop) -> bool:
    return any(scaler.stepped for key, scaler in loop.scalers.items() if key != event.scaler)


@rule(
    OfOptimizer,
    mistake="scaler.update is called between backward and step (between the steps of two optimizers)",
    effect="gradients of the old scale are divided by the new one: wrong by a factor whenever the scale changes",
    change="scaler.update()  # once, after the steps of all optimizers",
)
def update_between_steps(event: OfOptimizer, loop: Loop) -> Iterator[Line]:
    """Unscaled or stepped, and scaled before the scaler's last update."""
    if event.scaler is None or not event.enabled:
        return
    for gradient in loop.present(event.parameters):
        if gradient.condition is Condition.SCALED and gradient.updates != loop.updates_of(gradient.scaler):
            yield event.line
            return


@rule(
    Ended,
    mistake="an optimizer gets gradients and is never stepped",
    effect="its parameters never change",
    change="scaler.step(other_optimizer)  # for each optimizer, before scaler.update",
)
def optimizer_not_stepped(_event: Ended, loop: Loop) -> Iterator[Line]:
    """No step, although it cleared unused gradients again and again, while others were stepped."""
    others_step = loop.steps >= _PASSES
    for optimizer in loop.optimizers.values():
        if others_step and not optimizer.steps and optimizer.clears >= _PASSES and optimizer.last_pass is not None:
            yield optimizer.last_pass.line


@rule(
    StepCalled,
    mistake="zero_grad is called between backward and step",
    effect="the step gets no gradients: the parameters never change (torch raises if the gradients are None)",
    change="optimizer.zero_grad()  # before backward, or after the step",
)
def cleared_before_step(event: StepCalled, loop: Loop) -> Iterator[Line]:
    """Stepped without a gradient, after a backward pass whose gradients were cleared."""
    cleared = loop.optimizer(event.optimizer).cleared
    if cleared is not None and not loop.present(event.parameters):
        yield cleared


@rule(
    SchedulerStepped,
    mistake="the learning-rate scheduler is stepped although the optimizer's step was skipped",
    effect="the schedule runs ahead of the steps: warm-up is cut short, and torch warns of the order",
    change="if the step was applied: scheduler.step()  # a step_post_hook of the optimizer sees it",
)
def scheduler_on_skipped(event: SchedulerStepped, loop: Loop) -> Iterator[Line]:
    """Stepped, and each step of its optimizer since its last call was skipped."""
    outcomes = loop.outcomes.get(event.optimizer, [])
    if outcomes and not any(outcomes):
        yield event.line
