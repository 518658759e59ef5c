"""The claim: the search ends next to the largest scale that is clean, in few skips, and then the rule is torch's."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from funcamp import ScalerConfig, init, presets, update
from funcamp._scaler.state import RuleState
from tests.conftest import Transform
from tests.support.oracle import PlainRule, flagged


@dataclass
class PlainSearch:
    """The search on Python numbers."""

    scale: float
    stride: int = 1
    left: int | None = None
    done: bool = False

    def update(self, found_inf: bool) -> None:
        """One step; nothing more is defined once it is done."""
        if found_inf and self.left is None:
            self.scale = max(self.scale / 2.0**self.stride, 1.0) if self.scale > 1.0 else self.scale / 2.0
            self.stride = min(2 * self.stride, 32)
        elif found_inf:
            self.scale, self.done = self.scale / 4.0, True
        else:
            if self.left is None:
                self.left = 127 if self.stride == 1 else self.stride // 2 - 2
            if self.left > 0 and self.scale * 2.0 <= 2.0**24:
                self.scale, self.left = self.scale * 2.0, self.left - 1
                self.done = self.left == 0
            else:
                self.done = True


def run(config: ScalerConfig, threshold: float, steps: int) -> tuple[list[float], list[bool]]:
    """Scales and skips where exactly the scales above a threshold overflow."""
    state, scales, skips = init(config), [], []
    for _ in range(steps):
        found = state.scale.item() > threshold
        state = update(flagged(state, found), config)
        scales.append(state.scale.item())
        skips.append(found)
    return scales, skips


@pytest.mark.parametrize("start", [0, 8, 16, 24, 32])
@pytest.mark.parametrize("threshold", range(0, 25, 3))
def test_search_ends_at_the_largest_clean_scale_or_its_half(start: int, threshold: int) -> None:
    scales, skips = run(presets.warm_start(2.0**start, growth_interval=1000), 2.0**threshold * 1.5, 60)
    assert scales[-1] in (2.0**threshold, 2.0 ** (threshold - 1))
    # falls of 1, 2, 4, ..., and one skip at the end of the climb
    assert sum(skips) <= max(start - threshold, 0).bit_length() + 1


@pytest.mark.parametrize("seed", range(30))
def test_search_follows_plain_python(seed: int) -> None:
    rng = random.Random(seed)
    config = presets.warm_start(2.0 ** rng.randrange(0, 33))
    state, plain = init(config), PlainSearch(config.init_scale)
    while not plain.done:
        found = rng.random() < 0.5
        state = update(flagged(state, found), config)
        plain.update(found)
        assert state.scale.item() == plain.scale
    assert isinstance(state, RuleState)
    assert state.counters == {"stride": 0}


@pytest.mark.compiled
def test_after_the_search_the_rule_is_torchs(transform: Transform) -> None:
    config = presets.warm_start(8.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=2)
    step = transform(lambda state: update(state, config))
    state, plain, rng = init(config), PlainRule(4.0, 0, 1.7, 0.3, 2), random.Random(0)
    state = step(flagged(step(flagged(state, False)), True))  # clean at 8, refused at 16
    for _ in range(20):
        assert (state.scale.item(), state.growth_tracker.item()) == (plain.scale, plain.tracker)
        found = rng.random() < 0.4
        state = step(flagged(state, found))
        plain.update(float(found))


def test_search_stops_at_the_maximum() -> None:
    for first, max_scale, expected in ((2.0**20, None, 2.0**24), (4.0, 10.0, 8.0), (2.0**30, None, 2.0**30)):
        assert run(presets.warm_start(first, max_scale=max_scale), 2.0**60, 10)[0][-1] == expected
