"""SAM: an overflow of the second gradient alone skips the step as one of the first does."""

from __future__ import annotations

import pytest
import torch

import funcamp
from tests.recipes import example, oracle, trace_of
from tests.support.helpers import assert_close, one_thread


def test_far_climb_overflows_in_the_second_pass_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = example("sam")
    monkeypatch.setattr(recipe, "RHO", 2.0)
    checks: list[float] = []
    plain = funcamp.unscale_and_check

    def watched(state: funcamp.ScalerState, grads: object) -> object:
        unscaled, after = plain(state, grads)
        checks.append(after.found_inf.item())
        return unscaled, after

    monkeypatch.setattr("funcamp._autograd.scaled_grad.unscale_and_check", watched)
    with one_thread():
        params, history = recipe.train(40, lambda step: step)
        expected, trace = oracle("sam").oracle(recipe, 40, "cpu")
    assert trace_of(history) == trace
    assert_close(params, expected, 0.0)
    first, both = torch.tensor(checks).reshape(-1, 2).T
    assert ((first == 0) & (both == 1)).any()
