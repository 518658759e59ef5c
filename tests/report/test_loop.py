"""The state machine: what a gradient is after two backward passes, and after each call between them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from funcamp.report import events
from funcamp.report.events import Backward, Event, Reduction
from funcamp.report.known import Condition, Mixture
from funcamp.report.lines import Line, Place
from funcamp.report.loop import Loop

PARAMETER, OPTIMIZER, SCALER, OTHER = 1, 2, 3, 4
HERE = Line("train.py", 1)
CALL = (OPTIMIZER, SCALER, (PARAMETER,), True, False)

PLAIN = Backward(HERE, (PARAMETER,), frozenset(), None, frozenset(), Reduction.MEAN, None, (Place(HERE, 0),), "")
SCALED = replace(PLAIN, scaler=SCALER, dtypes=frozenset({torch.float16}))
UNSCALE = events.Unscaled(HERE, *CALL)
STEP = events.StepCalled(HERE, *CALL)
UPDATE = events.Updated(HERE, SCALER, sets_scale=False, is_enabled=True)
CLEAR = events.Cleared(HERE, (PARAMETER,), OPTIMIZER)
WRITE = events.GradientWritten(HERE, (PARAMETER,), is_still_scaled=False)


@pytest.mark.parametrize(
    ("happened", "condition", "mixture"),
    [
        ([PLAIN], Condition.PLAIN, None),
        ([SCALED], Condition.SCALED, None),
        ([SCALED, UNSCALE], Condition.UNSCALED, None),
        ([SCALED, WRITE], Condition.UNSCALED, None),
        ([SCALED, UNSCALE, PLAIN], Condition.UNSCALED, None),
        ([SCALED, STEP], Condition.USED, None),
        ([SCALED, CLEAR], Condition.ABSENT, None),
        ([SCALED, STEP, UPDATE, replace(SCALED, empty=frozenset({PARAMETER}))], Condition.SCALED, None),
        ([PLAIN, SCALED], Condition.MIXED, Mixture.SCALED_AND_PLAIN),
        ([SCALED, UNSCALE, SCALED, SCALED, UNSCALE], Condition.MIXED, Mixture.SCALED_ON_UNSCALED),
        ([SCALED, UPDATE, SCALED], Condition.MIXED, Mixture.TWO_SCALES),
        ([SCALED, replace(SCALED, scaler=OTHER)], Condition.MIXED, Mixture.TWO_SCALES),
        ([SCALED, STEP, UPDATE, SCALED], Condition.MIXED, Mixture.ON_USED),
    ],
)
def test_a_gradient_is_in_the_condition_that_its_events_lead_to(
    happened: list[Event], condition: Condition, mixture: Mixture | None
) -> None:
    loop = Loop()
    for event in happened:
        loop.follow(event)
    gradient = loop.gradient(PARAMETER)
    assert gradient.condition is condition
    if condition is Condition.MIXED:
        assert gradient.mixture is mixture
