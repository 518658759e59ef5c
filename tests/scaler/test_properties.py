"""Properties that hold for any gradients, scales and flags."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from funcamp import ScalerConfig, init, scale, skip_step, stateless, unscale, unscale_and_check, update
from tests.support.helpers import assert_same, clone
from tests.support.oracle import state_of

settings.register_profile("funcamp", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("funcamp")

finite = st.floats(
    width=32, allow_nan=False, allow_infinity=False, min_value=-1e6, max_value=1e6, allow_subnormal=False
).map(lambda number: number if abs(number) > 1e-30 else 0.0)  # so that no scale below makes one subnormal
vectors = st.lists(finite, min_size=1, max_size=5).map(torch.tensor)
trees = st.recursive(vectors, lambda inner: st.dictionaries(st.sampled_from("abc"), inner, min_size=1), max_leaves=5)
bad = st.sampled_from([math.nan, math.inf, -math.inf])


@given(trees, st.integers(-20, 20))
def test_unscale_after_scale_is_the_identity_for_powers_of_two(tree: Any, exponent: int) -> None:
    state = state_of(2.0**exponent)
    assert_same(unscale(state, scale(state, tree)), tree)


@given(trees, bad, st.data())
def test_a_non_finite_value_anywhere_sets_the_flag_and_reverts_everything(tree: Any, value: float, data: Any) -> None:
    optimizer = stateless(torch.optim.AdamW)
    opt_state = optimizer.init(tree)
    grads = clone(tree)
    leaf: Tensor = data.draw(st.sampled_from(torch.utils._pytree.tree_leaves(grads)))
    leaf[data.draw(st.integers(0, leaf.numel() - 1))] = value
    unscaled, state = unscale_and_check(state_of(2.0**10), grads)
    assert state.found_inf == 1.0
    new = optimizer.update(tree, unscaled, opt_state)
    assert_same(skip_step(state, new=new, old=(tree, opt_state)), (tree, opt_state))


@given(
    st.lists(st.sampled_from([0.0, 1.0, math.nan]), max_size=60),
    st.floats(1.001, 1e30),
    st.floats(1e-6, 0.999),
    st.integers(1, 4),
    st.none() | st.floats(2.0**-100, 2.0**10),
    st.none() | st.floats(2.0**10, 2.0**120),
)
def test_the_scale_stays_finite_and_within_its_bounds(
    flags: list[float], growth: float, backoff: float, interval: int, low: float | None, high: float | None
) -> None:
    config = ScalerConfig(2.0**10, growth, backoff, interval, low, high)
    state = init(config)
    for flag in flags:
        state = update(state._replace(found_inf=torch.tensor(flag)), config)
        assert torch.isfinite(state.scale)
        assert torch.tensor(low or 0.0) <= state.scale <= torch.tensor(high or math.inf)
        assert 0 <= state.growth_tracker < interval
