"""Checkpoints: what is saved, and what is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from funcamp.report.events import Ended, StepCalled
from funcamp.report.lines import Line
from funcamp.report.loop import Loop
from funcamp.report.rules.rule import rule


@rule(
    Ended,
    mistake="a checkpoint has the optimizer and not the scaler",
    effect="a resumed run starts with the first scale: it skips steps again, or loses small gradients for a while",
    change='checkpoint["scaler"] = scaler.state_dict()',
)
def checkpoint_without_scaler(_event: Ended, loop: Loop) -> Iterator[Line]:
    """An optimizer's state was saved and a scaler was updated, and no scaler's state was saved."""
    scalers = loop.scalers.values()
    is_used = any(scaler.updates for scaler in scalers)
    if loop.optimizer_saved_line is not None and is_used and not any(scaler.is_saved for scaler in scalers):
        yield loop.optimizer_saved_line


@rule(
    StepCalled,
    mistake="a run resumes the optimizer and not the scaler",
    effect="the scale starts over: the first steps are skipped again, or small gradients are lost for a while",
    change='scaler.load_state_dict(checkpoint["scaler"])',
)
def scale_restarts(event: StepCalled, loop: Loop) -> Iterator[Line]:
    """The first step of a scaler whose state was not loaded, with an optimizer whose state was."""
    loaded_line = loop.optimizer(event.optimizer).loaded_line
    if event.scaler is None or not event.has_enabled_scaler or loaded_line is None:
        return
    scaler = loop.scaler(event.scaler)
    if not scaler.steps and not scaler.is_loaded:
        yield loaded_line
