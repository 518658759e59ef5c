"""`skip_step` selects whole trees by the flag, and nothing but the flag."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from funcamp import skip_step, unscale_and_check, update
from tests.conftest import Transform
from tests.support.helpers import assert_same, clone
from tests.support.oracle import state_of

#: Parameters of before may be anything, and nothing of a new one may come through.
OLD = torch.tensor([1.0, -0.0, 2.0**-149, math.nan])
NEW = torch.tensor([math.nan, math.inf, -math.inf, 1.0])


def tree(values: torch.Tensor, number: int) -> dict[str, Any]:
    return {
        "w": values,
        "h": [values.half(), None, "name"],
        "count": torch.tensor(number),
        "z": torch.complex(values, values),
        "mask": torch.tensor([number > 1]),
        "empty": torch.zeros(0),
    }


@pytest.mark.parametrize("flag", [0.0, -0.0, 1.0, 2.0, 0.5, math.nan])
def test_the_flag_chooses_between_new_and_old(flag: float) -> None:
    new, old = tree(NEW, 2), tree(OLD, 1)
    before = clone((new, old))
    assert_same(skip_step(state_of(8.0, found_inf=flag), new=new, old=old), old if flag != 0 else new)
    assert_same((new, old), before)


@pytest.mark.compiled
def test_the_choice_is_the_same_under_every_transform(transform: Transform) -> None:
    new, old = ({name: tree(*given)[name] for name in ("w", "count", "mask")} for given in ((NEW, 2), (OLD, 1)))
    run = transform(lambda state, new, old: skip_step(state, new=new, old=old))
    for flag, expected in ((1.0, old), (0.0, new)):
        assert_same(run(state_of(8.0, found_inf=flag), new, old), expected)


def test_one_overflowing_member_of_a_batch_is_skipped_alone() -> None:
    def step(state: Any, grads: torch.Tensor) -> Any:
        unscaled, state = unscale_and_check(state, grads)
        return skip_step(state, new=-unscaled, old=torch.zeros(2)), update(state)

    grads = torch.full((3, 2), 8.0)
    grads[1, 0] = math.inf
    params, states = torch.func.vmap(step)(tree_map(lambda leaf: leaf.expand(3), state_of(8.0)), grads)
    assert params.tolist() == [[-1.0, -1.0], [0.0, 0.0], [-1.0, -1.0]]
    assert states.scale.tolist() == [8.0, 4.0, 8.0]
    assert states.growth_tracker.tolist() == [1, 0, 1]


def test_an_unchanged_leaf_is_returned_itself() -> None:
    assert skip_step(state_of(8.0), new=[OLD], old=[OLD])[0] is OLD
