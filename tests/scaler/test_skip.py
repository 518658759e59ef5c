"""`skip_step` selects whole trees by the flag, and nothing but the flag."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from funcamp import skip_step, unscale_and_check, update
from tests.conftest import Transform
from tests.support.helpers import assert_same, clone
from tests.support.oracle import state_of


def tree(value: float) -> dict[str, Any]:
    return {
        "w": torch.full((2, 3), value),
        "h": [torch.full((3,), value).half(), None, "name"],
        "count": torch.full((), int(value), dtype=torch.int64),
        "z": torch.full((2,), complex(value, -value)),
        "mask": torch.tensor([value > 1]),
        "empty": torch.zeros(0),
    }


@pytest.mark.parametrize("flag", [0.0, -0.0, 1.0, 2.0, 0.5, math.nan])
def test_skip_step_chooses_by_the_flag(flag: float) -> None:
    new, old = tree(2.0), tree(1.0)
    assert_same(skip_step(state_of(8.0, found_inf=flag), new=new, old=old), old if flag != 0 else new)


def test_skip_step_never_lets_a_non_finite_new_value_through() -> None:
    new = {"w": torch.tensor([math.nan, math.inf, -math.inf, 1.0])}
    old = {"w": torch.tensor([1.0, -0.0, 2.0**-149, math.nan])}
    assert_same(skip_step(state_of(8.0, found_inf=1.0), new=new, old=old), old)


@pytest.mark.compiled
def test_skip_step_every_transform_agrees(transform: Transform) -> None:
    new, old = ({k: v for k, v in tree(x).items() if k in ("w", "count", "mask")} for x in (2.0, 1.0))
    run = transform(lambda state, new, old: skip_step(state, new=new, old=old))
    assert_same(run(state_of(8.0, found_inf=1.0), new, old), old)
    assert_same(run(state_of(8.0), new, old), new)


def test_one_overflowing_member_of_a_batch_is_skipped_alone() -> None:
    def step(state: Any, w: torch.Tensor, g: torch.Tensor) -> Any:
        grad, state = unscale_and_check(state, g)
        return skip_step(state, new=w - grad, old=w), update(state)

    states = type(state_of(1.0))(torch.full((3,), 8.0), torch.zeros(3, dtype=torch.int32), torch.zeros(3))
    grads = torch.full((3, 2), 8.0)
    grads[1, 0] = math.inf
    w, after = torch.func.vmap(step)(states, torch.zeros(3, 2), grads)
    assert w.tolist() == [[-1.0, -1.0], [0.0, 0.0], [-1.0, -1.0]]
    assert after.scale.tolist() == [8.0, 4.0, 8.0]
    assert after.growth_tracker.tolist() == [1, 0, 1]


def test_skip_step_leaves_its_arguments_alone_and_returns_an_unchanged_leaf_itself() -> None:
    new, old = tree(2.0), tree(1.0)
    new["w"] = old["w"]
    before = clone((new, old))
    out = skip_step(state_of(8.0), new=new, old=old)
    assert out["w"] is old["w"]
    assert_same((new, old), before)
