"""Accumulation: several backward passes for one step."""

from __future__ import annotations

from collections.abc import Iterator

from funcamp._audit.events import Backward, Form, StepCalled
from funcamp._audit.lines import Line, are_in_one_loop
from funcamp._audit.loop import Condition, Loop, Mixture
from funcamp._audit.rules.rule import rule


@rule(
    Backward,
    mistake="unscale_ is called before the last micro-batch of a window",
    effect="scaled gradients are added to unscaled ones: the earlier micro-batches have almost no weight",
    change="if the window ends: scaler.unscale_(optimizer)",
)
def unscale_in_window(event: Backward, loop: Loop) -> Iterator[Line]:
    """A scaled pass that adds to gradients that `unscale_` unscaled."""
    if event.scaler is None:
        return
    added_to = [loop.gradient(parameter) for parameter in event.parameters if parameter not in event.empty]
    yield from {
        gradient.line for gradient in added_to if gradient.condition is Condition.UNSCALED and not gradient.is_written
    }


@rule(
    StepCalled,
    mistake="mean losses of several micro-batches are added and not divided by their number",
    effect="the gradient is larger by the number of micro-batches: a larger learning rate, and another clipping",
    change="loss = loss / micro_batches  # before scaler.scale(loss).backward()",
)
def accumulation_not_divided(event: StepCalled, loop: Loop) -> Iterator[Line]:
    """Stepped in the loop of the passes: not in each iteration of it, so that the batches are micro-batches."""
    window = _added_means(event, loop)
    if window and are_in_one_loop(window[0].lines, event.lines):
        yield window[0].line


@rule(
    StepCalled,
    mistake="mean losses are added by an inner loop and not divided by their number",
    effect="right for a sum over domains or tasks; of micro-batches, the gradient is larger by their number",
    change="loss = loss / micro_batches  # before scaler.scale(loss).backward(), if they are micro-batches",
    is_note=True,
)
def means_added(event: StepCalled, loop: Loop) -> Iterator[Line]:
    """Stepped after the loop of the passes, or elsewhere."""
    window = _added_means(event, loop)
    if window and not are_in_one_loop(window[0].lines, event.lines):
        yield window[0].line


def _added_means(event: StepCalled, loop: Loop) -> list[Backward]:
    """Return the passes of a step if they are of one line, each of a mean, and nothing divided the gradients.

    Not with retained graphs, which several losses of one batch share; nor of different parameters, as those of tasks
    with heads of their own.
    """
    window = loop.optimizer(event.optimizer).window
    stepped = set(event.parameters)
    is_repeated = len(window) > 1 and len({one.lines for one in window}) == 1
    is_written = any(gradient.is_written for gradient in loop.present(event.parameters))
    is_shared = any(one.retains_graph for one in window)
    is_of_tasks = len({frozenset(stepped.intersection(one.parameters)) for one in window}) > 1
    if not is_repeated or is_written or is_shared or is_of_tasks:
        return []
    return window if all(one.form is Form.MEAN for one in window) else []


@rule(
    StepCalled,
    mistake="gradients are not cleared between a step and the next backward pass",
    effect="gradients that were unscaled and used are added to scaled ones, and used again",
    change="optimizer.zero_grad()  # after each step",
)
def gradients_not_cleared(event: StepCalled, loop: Loop) -> Iterator[Line]:
    """Stepped with gradients that were added to used ones."""
    if event.scaler is not None and event.enabled:
        yield from _lines_of_mixtures(event, loop, Mixture.ON_SPENT)


@rule(
    StepCalled,
    mistake="gradients of two scales are added: scaler.update is called within a window, or two scalers are used",
    effect="one scale divides both: the micro-batches have different weights whenever the scale changes",
    change="if the window ends: scaler.step(optimizer); scaler.update()",
)
def update_in_window(event: StepCalled, loop: Loop) -> Iterator[Line]:
    """Stepped with gradients of two scales."""
    yield from _lines_of_mixtures(event, loop, Mixture.TWO_SCALES)


def _lines_of_mixtures(event: StepCalled, loop: Loop, mixture: Mixture) -> set[Line]:
    """Return the lines that made mixed gradients of a kind."""
    return {
        gradient.line
        for gradient in loop.present(event.parameters)
        if gradient.condition is Condition.MIXED and gradient.mixture is mixture
    }
