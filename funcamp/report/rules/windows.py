"""Windows: gradients that several backward passes accumulate for one step."""

from __future__ import annotations

from collections.abc import Iterator

from funcamp.report.events import Backward, StepCalled
from funcamp.report.known import Condition
from funcamp.report.lines import Line
from funcamp.report.loop import Loop
from funcamp.report.rules.rule import rule


@rule(
    Backward,
    mistake="unscale_ is called before the last micro-batch of a window",
    effect="scaled gradients are added to unscaled ones: the earlier micro-batches have almost no weight",
    change="if the window ends: scaler.unscale_(optimizer)",
)
def unscale_in_window(event: Backward, loop: Loop) -> Iterator[Line]:
    """A scaled pass adds to gradients that `unscale_` unscaled."""
    if event.scaler is None:
        return
    added_to = [loop.gradient(parameter) for parameter in event.parameters if parameter not in event.empty]
    yield from {
        gradient.line for gradient in added_to if gradient.condition is Condition.UNSCALED and not gradient.is_written
    }


@rule(
    StepCalled,
    mistake="gradients are not cleared between a step and the next backward pass",
    effect="gradients that were unscaled and used are added to scaled ones, and used again",
    change="optimizer.zero_grad()  # after each step",
)
def gradients_not_cleared(event: StepCalled, loop: Loop) -> Iterator[Line]:
    """Stepped by a scaler, and gradients contain those that an earlier step has used."""
    if event.has_enabled_scaler:
        yield from _lines_of_mixtures(event, loop, Condition.ON_USED)


@rule(
    StepCalled,
    mistake="gradients of two scales are added: scaler.update is called within a window, or two scalers are used",
    effect="one scale divides both: the micro-batches have different weights whenever the scale changes",
    change="if the window ends: scaler.step(optimizer); scaler.update()",
)
def update_in_window(event: StepCalled, loop: Loop) -> Iterator[Line]:
    """Stepped with gradients that were scaled by two scales."""
    yield from _lines_of_mixtures(event, loop, Condition.TWO_SCALES)


def _lines_of_mixtures(event: StepCalled, loop: Loop, mixture: Condition) -> set[Line]:
    """Return the lines of the backward passes that mixed the gradients in this way."""
    return {gradient.line for gradient in loop.gradients_of(event.parameters) if gradient.condition is mixture}
