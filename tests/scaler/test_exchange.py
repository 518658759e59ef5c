"""The claim: the five entries go both ways between funcamp's state and torch's scaler, at any point of a run."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from funcamp import GradScaler, ScalerConfig, from_state_dict, init, presets, to_state_dict, update
from tests.support.helpers import assert_same
from tests.support.oracle import flagged, state_of
from tests.support.torch_loop import ScaledLoop

FIVE = {"scale": 8.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 4, "_growth_tracker": 2}


def torch_step(scaler: Any, found: bool) -> None:
    loop = ScaledLoop(scaler, torch.optim.SGD, {"w": torch.zeros(())}, lr=1.0)
    loop.step({"w": torch.tensor(math.inf if found else 1.0)})


@pytest.mark.parametrize("cls", [torch.amp.GradScaler, GradScaler])
def test_a_run_changes_hands_at_every_step(cls: Any) -> None:
    rng = random.Random(0)
    config = ScalerConfig(1000.0, 1.7, 0.3, 2)
    state, alone = init(config), torch.amp.GradScaler("cpu", 1000.0, 1.7, 0.3, 2)
    for _ in range(40):
        found = rng.random() < 0.4
        torch_step(alone, found)
        if rng.random() < 0.5:
            scaler = cls("cpu")
            scaler.load_state_dict(to_state_dict(state, config))
            torch_step(scaler, found)
            state, config = from_state_dict(scaler.state_dict())
        else:
            state = update(flagged(state, found), config)
        assert to_state_dict(state, config) == alone.state_dict()


def test_numbers_of_numpy_are_numbers_and_infinity_is_a_scale() -> None:
    state, _ = from_state_dict(FIVE | {"scale": np.float32(8.0), "_growth_tracker": np.int64(2)})
    assert_same(state, state_of(8.0, 2))
    assert from_state_dict(FIVE | {"scale": math.inf})[0].scale == math.inf  # which torch may save


@pytest.mark.parametrize("preset", [presets.megatron, presets.fairseq])
def test_counters_of_a_rule_go_along(preset: Any) -> None:
    config = preset()
    state = init(config)
    for found in (True, True, False, True, False):
        state = update(flagged(state, found), config)
        again, same = from_state_dict(to_state_dict(state, config), config)
        assert_same(again, state)
        assert same == config
    bare, _ = from_state_dict(FIVE | {"backoff_factor": 1 / 3}, config)  # torch's own dict
    assert_same(tuple(bare)[3:], tuple(init(config))[3:])


def test_a_dict_before_the_first_scale_is_a_state() -> None:
    saved = torch.amp.GradScaler("cpu", growth_interval=7).state_dict()
    assert_same(from_state_dict(saved), (init(), ScalerConfig(growth_interval=7)))


def test_bounds_and_rule_stay_the_configurations() -> None:
    state, config = from_state_dict(FIVE, ScalerConfig(4.0, min_scale=2.0, max_scale=16.0))
    assert config == ScalerConfig(4.0, 3.0, 0.25, 4, 2.0, 16.0)
    assert_same(state, state_of(8.0, 2))


#: A saved dict, the error, and its words.
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "a list": ([1], TypeError, "saved must be a dict; got a list of an int"),
    "empty": ({}, ValueError, "saved must have 'scale'; it is empty, as a disabled scaler saves it"),
    "a part": ({"scale": 1.0}, ValueError, "saved must have 'growth_factor'; it has scale"),
    "NaN": (FIVE | {"scale": math.nan}, ValueError, r"saved\['scale'\] must be 0 or more, within .* got nan"),
    "beyond int32": (FIVE | {"_growth_tracker": 2**40}, ValueError, r"must be -2147483648 to 2147483647"),
    "a counter of another rule": (
        FIVE | {"hysteresis_tracker": 2}, ValueError, "config must have the rule of the saved state; got Torch, .*hyst"
    ),
    "a factor": (FIVE | {"backoff_factor": 1.1}, ValueError, "backoff_factor must be above 0 and at most 1; got 1.1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_dict_is_refused_by_the_entry(name: str) -> None:
    saved, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        from_state_dict(saved)
