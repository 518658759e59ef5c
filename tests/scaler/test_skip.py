"""`skip_step` selects whole trees by the flag, and nothing but the flag."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from funcamp import skip_step
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


def test_an_unchanged_leaf_is_returned_itself() -> None:
    assert skip_step(state_of(8.0), new=[OLD], old=[OLD])[0] is OLD
