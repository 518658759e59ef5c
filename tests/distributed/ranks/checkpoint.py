"""States saved by torch.distributed.checkpoint and restored on another number of ranks, bit for bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from funcamp import distributed
from funcamp.distributed import DataParallel
from tests.distributed.ranks.step import LOW, made
from tests.distributed.ranks.tools import assert_equal_on_all_ranks, shared_folder, square, world
from tests.support.helpers import assert_same
from tests.support.models import mlp


def step_of(parallel: DataParallel | None) -> Any:
    return made(mlp(), LOW, parallel=parallel, ema_decay=0.9)


def trained(step: Any) -> Any:
    """A state after three steps, with moments and an average."""
    state = step.init()
    for number in range(3):
        state, _ = step(state, mlp().batch(number))
    assert state.skipped == 0
    return state


def test_a_state_goes_on_sharded_or_not_on_another_number_of_ranks_and_on_one() -> None:
    sharded, complete = DataParallel(shard=True), DataParallel()
    # Of the second mesh every rank has a half of the state, as on two ranks.
    halves = [DataParallel(group, shard=True) for group in (square(), square()["columns"])] if world() == 4 else []
    steps = [step_of(parallel) for parallel in (sharded, complete, *halves, None)]
    batch = torch.ones(4, 8), torch.zeros(4, dtype=torch.int64)
    warnings.simplefilter("ignore")  # torch's own
    for step in steps[:3]:
        state, folder = trained(step), shared_folder()
        save(distributed.sharded_state_dict(state), checkpoint_id=folder)
        for other in steps:
            values = distributed.sharded_state_dict(other.init())
            load(values, checkpoint_id=folder, no_dist=other is steps[-1])
            back = distributed.load_sharded_state_dict(dict(reversed(values.items())), other.init())
            assert_same(distributed.gather_state(back), distributed.gather_state(state))
            if other is step:
                assert_same(step(back, batch)[0], step(state, batch)[0])


@pytest.mark.ranks(n=2)
def test_plain_names_pass_between_sharded_and_full_states() -> None:
    sharded, alone = step_of(DataParallel(shard=True)), step_of(None)
    state = trained(sharded)
    names = sharded.state_dict(state)
    assert_equal_on_all_ranks(names)
    full = alone.load_state_dict(names, like=alone.init())
    assert_same(full, distributed.gather_state(state))
    assert_same(sharded.load_state_dict(alone.state_dict(full), like=sharded.init()), state)
