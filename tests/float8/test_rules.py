"""The claim: scale and history of delayed scaling move as in the libraries, bit for bit; a bad step leaves no trace."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import float8
from tests.conftest import Transform
from tests.float8 import peer_rules
from tests.support.helpers import assert_same

TOPS = (peer_rules.E4M3_MAX, peer_rules.E4M3_MAX, peer_rules.E5M2_MAX)

#: The configuration, and the oracle of one tensor.
CASES: dict[str, tuple[float8.Float8Config, Any]] = {
    "transformer_engine": (float8.transformer_engine(), peer_rules.TransformerEngine),
    "short history": (
        float8.transformer_engine(amax_history_len=3),
        lambda top: peer_rules.TransformerEngine(top, amax_history_len=3),
    ),
    "history of 1": (
        float8.transformer_engine(amax_history_len=1),
        lambda top: peer_rules.TransformerEngine(top, amax_history_len=1),
    ),
    "margin, most recent": (
        float8.transformer_engine(3, 5, "most_recent"),
        lambda top: peer_rules.TransformerEngine(top, 3, 5, "most_recent"),
    ),
    "margin 8": (
        float8.transformer_engine(8, 4),
        lambda top: peer_rules.TransformerEngine(top, 8, 4),
    ),
    "megatron": (float8.megatron(), peer_rules.Megatron),
}


def amaxes(steps: int, products: int) -> Tensor:
    """Amaxes that wander over float32's range; now and then a tensor has only zeros, or numbers near a limit."""
    rng = random.Random(5)
    rows, level = [], [rng.uniform(-20, 20) for _ in range(3 * products)]
    for _ in range(steps):
        level = [one + rng.gauss(0, 1.5) for one in level]
        row = [rng.choice([1.0, rng.uniform(1, 2), 1.75]) * 2.0 ** max(-149, min(127, round(one))) for one in level]
        odd = rng.random()
        if odd < 0.2:
            row[rng.randrange(len(row))] = rng.choice([0.0, 0.0, 2.0**-149, 2.0**-120, peer_rules.FLOAT32_MAX])
        rows.append(row)
    return torch.tensor(rows).view(steps, products, 3)


@pytest.mark.parametrize("case", CASES)
def test_500_steps_are_the_librarys(case: str) -> None:
    config, make = CASES[case]
    plain = [[make(top) for top in TOPS] for _ in range(2)]
    state = float8.init(config, 2)
    for amax in amaxes(500, 2):
        oldest = state.history[-1]
        state = float8.update(state, amax, config)
        for number, row in enumerate(plain):
            for place, one in enumerate(row):
                one.update(amax[number, place].item())
                assert state.scale[number, place].item() == one.scale
                found = state.history[:, number, place].tolist()
                if config.history > 1:
                    assert found[:-1] == one.newest_first(0.0)[:-1]
                    assert found[-1] in (0.0, oldest[number, place], state.history[-1, number, place])


def test_500_steps_are_flaxs() -> None:
    config = float8.flax(7)
    plain = [peer_rules.Flax(top, 7) for top in TOPS]
    state = float8.init(config, 1)
    for amax in amaxes(500, 1).clamp(min=2.0**-110):  # no zeros, and no infinite scales
        for place, one in enumerate(plain):
            one.update(amax[0, place].item())
            # Before the step's own amax: the scale of this step.
            assert (
                float8.Quantized(torch.zeros(()), state.scale[0, place]).scale.double().reciprocal().float()
                == one.scale
            )
        state = float8.update(state, amax, config)
        for place, one in enumerate(plain):
            assert state.history[:, 0, place].tolist() == one.newest_first()


@pytest.mark.parametrize("bad", [math.inf, math.nan, 0.0])
def test_an_amax_that_is_not_finite_or_zero_leaves_its_tensor_as_it_was(bad: float) -> None:
    config = float8.transformer_engine(amax_history_len=4)
    state = float8.update(float8.init(config, 2), torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), config)
    after = float8.update(state, torch.tensor([[7.0, bad, 8.0], [9.0, 9.0, bad]]), config)
    kept = torch.tensor([[False, True, False], [False, False, True]])
    assert_same(after.scale[kept], state.scale[kept])
    assert_same(after.history[:, kept], state.history[:, kept])
    assert_same(after.history[0, ~kept], torch.tensor([7.0, 8.0, 9.0, 9.0]))
    # The library keeps an infinite amax for the length of its history.
    plain = peer_rules.TransformerEngine(peer_rules.E4M3_MAX, amax_history_len=4)
    plain.update(math.inf)
    for _ in range(3):
        plain.update(1.0)
        assert plain.scale == 1.0


def test_a_skipped_step_leaves_no_trace() -> None:
    config = float8.megatron()
    state = float8.update(float8.init(config, 2), torch.rand(2, 3), config)
    for flag in (1.0, math.nan):
        assert_same(float8.update(state, torch.rand(2, 3), config, found_inf=torch.tensor(flag)), state)
    amax = torch.rand(2, 3)
    assert_same(float8.update(state, amax, config, found_inf=torch.tensor(0.0)), float8.update(state, amax, config))


def test_the_scale_stays_finite_and_above_zero() -> None:
    config = float8.transformer_engine(margin=8, amax_history_len=1)
    for amax in (2.0**-149, 2.0**-130, 1.0, peer_rules.FLOAT32_MAX):
        scale = float8.update(float8.init(config, 1), torch.full((1, 3), amax), config).scale
        assert torch.isfinite(scale).all()
        assert torch.isfinite(1 / scale).all()


@pytest.mark.compiled
def test_update_under_every_transform(transform: Transform) -> None:
    config = float8.transformer_engine(margin=2, amax_history_len=3)
    state = float8.update(float8.init(config, 2), torch.rand(2, 3), config)
    amax = torch.tensor([[1.0, math.inf, 0.0], [3.0, 1e-30, 1e30]])

    def step(state: float8.Float8State, amax: Tensor, flag: Tensor) -> float8.Float8State:
        return float8.update(state, amax, config, found_inf=flag)

    for flag in (torch.tensor(0.0), torch.tensor(1.0)):
        assert_same(tuple(transform(step)(state, amax, flag)), tuple(step(state, amax, flag)))
