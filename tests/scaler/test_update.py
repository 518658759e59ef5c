"""`update` is torch's rule bit for bit: whole trajectories against torch's kernel and a plain-Python statement."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from funcamp import ScalerConfig, init, merge, presets, update
from tests.conftest import Transform
from tests.support.helpers import assert_same
from tests.support.oracle import PlainRule, TorchRule, flagged, float32, state_of

FLOAT32_MAX = torch.finfo(torch.float32).max
FACTORS = [(2.0, 0.5), (1.1, 0.3), (1.5, 0.25), (2.0, 0.25)]
EDGES = {
    "one": 1.0,
    "not a power of two": 3.7e4,
    "float32 max": FLOAT32_MAX,
    "half of float32 max": FLOAT32_MAX / 2,
    "smallest normal": 2.0**-126,
    "largest denormal": 2.0**-126 - 2.0**-149,
    "denormal": 5 * 2.0**-149,
    "smallest denormal": 2.0**-149,
    "zero": 0.0,
    "inf": math.inf,
    "nan": math.nan,
}


def assert_follows_torch(
    scale: float, tracker: int, flags: list[float], growth: float, backoff: float, interval: int
) -> None:
    """Compare funcamp, torch's kernel and plain Python after every flag."""
    config = ScalerConfig(growth_factor=growth, backoff_factor=backoff, growth_interval=interval)
    state = state_of(scale, tracker)
    kernel = TorchRule(state_of(scale, tracker), growth, backoff, interval)
    plain = PlainRule(float32(scale), tracker, growth, backoff, interval)
    for flag in flags:
        state = update(state._replace(found_inf=torch.tensor(flag)), config)
        kernel.update(flag)
        plain.update(flag)
        assert_same(state, kernel.state)
        assert_same(state, state_of(plain.scale, plain.tracker))


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize(("growth", "backoff"), FACTORS)
@pytest.mark.parametrize("interval", [1, 2, 3, 2000])
@pytest.mark.parametrize("probability", [0.02, 0.1, 0.4])
def test_random_flags_move_the_scale_as_torch(probability: float, interval: int, growth: float, backoff: float) -> None:
    rng = random.Random(f"{probability} {interval} {growth} {backoff}")
    flags = [float(rng.random() < probability) for _ in range(300)]
    # With interval 2000 a run starts just below the growth, so that it happens within the trajectory.
    assert_follows_torch(2.0**16, max(0, interval - 5), flags, growth, backoff, interval)


@pytest.mark.parametrize(("growth", "backoff"), FACTORS)
@pytest.mark.parametrize("scale", EDGES.values(), ids=EDGES)
def test_a_scale_at_an_edge_moves_as_torchs(scale: float, growth: float, backoff: float) -> None:
    for flags in itertools.product([0.0, 1.0], repeat=5):
        assert_follows_torch(scale, 0, list(flags), growth, backoff, 2)


@pytest.mark.parametrize("flag", [1.0, 2.0, 0.5, -1.0, 2.0**-149, math.nan, math.inf, -math.inf, -0.0])
def test_any_flag_but_zero_backs_off(flag: float) -> None:
    assert_follows_torch(2.0**16, 1, [flag, 0.0, flag], 2.0, 0.5, 3)


@pytest.mark.parametrize("tracker", [1, 2, 3, 4, 7, 2**31 - 2])
def test_a_tracker_around_a_lowered_interval_moves_as_torchs(tracker: int) -> None:
    assert_follows_torch(2.0**16, tracker, [0.0], 2.0, 0.5, 3)


@pytest.mark.compiled
def test_the_rule_is_torchs_under_every_transform(transform: Transform) -> None:
    # A configuration may be made in a trace.
    run = transform(lambda state: update(state, ScalerConfig(growth_factor=1.1, backoff_factor=0.3, growth_interval=2)))
    for scale, tracker, flag in itertools.product([2.0**16, 3.7e4, FLOAT32_MAX, 5 * 2.0**-149], [0, 1, 5], [0.0, 1.0]):
        kernel = TorchRule(state_of(scale, tracker), 1.1, 0.3, 2)
        kernel.update(flag)
        assert_same(run(state_of(scale, tracker, flag)), kernel.state)


def test_bounds_hold_on_every_step_and_do_not_change_the_tracker() -> None:
    config = ScalerConfig(init_scale=4.0, min_scale=2.0, max_scale=8.0, growth_interval=2)
    state = init(config)
    moves = {False: [(4, 1), (8, 0), (8, 1), (8, 0)], True: [(4, 0), (2, 0), (2, 0)]}
    for found, expected in moves.items():
        for scale, tracker in expected:
            state = update(flagged(state, found), config)
            assert_same(state, state_of(scale, tracker))
    assert update(state_of(1000.0), config).scale == 8.0


def test_a_static_scale_never_moves_and_the_flag_is_cleared() -> None:
    config = presets.static(128.0)
    for flag in (0.0, 1.0, math.nan):
        assert_same(update(init(config)._replace(found_inf=torch.tensor(flag)), config), state_of(128.0))


@pytest.mark.parametrize("new_scale", [3.0, torch.tensor(3.0), torch.tensor([3.0])], ids=["number", "0-dim", "1-dim"])
def test_new_scale_replaces_the_rule_and_keeps_the_tracker(new_scale: float | torch.Tensor) -> None:
    assert update(state_of(8.0), ScalerConfig(min_scale=4.0), new_scale=new_scale).scale == 4.0
    state = update(state_of(8.0, tracker=7, found_inf=1.0), new_scale=new_scale)
    if isinstance(new_scale, torch.Tensor):
        new_scale.mul_(0.5)  # shares no memory
    assert_same(state, state_of(3.0, tracker=7))


@pytest.mark.compiled
def test_merge_ors_any_nonzero_flag(transform: Transform) -> None:
    run = transform(merge)
    for flags in itertools.product([0.0, 1.0, 2.0, math.nan], repeat=3):
        expected = float(any(flag != 0 for flag in flags))
        assert_same(run(*(state_of(8.0, 3, flag) for flag in flags)), state_of(8.0, 3, expected))
