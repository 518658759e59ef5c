"""Delayed float8 scaling over ranks: one state, that of one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import funcamp
from funcamp import distributed
from tests.distributed.ranks import case
from tests.distributed.ranks.tools import assert_equal_on_all_ranks, called, mine, rank
from tests.float8.models import batch, net
from tests.support.helpers import assert_close, assert_same

POLICY = "float8,float8=delayed|history=3"


def made(policy: str = POLICY, **options: Any) -> funcamp.TrainStep:
    loss = funcamp.module_loss(net(), F.cross_entropy)
    adamw = funcamp.stateless(torch.optim.AdamW, lr=1e-2)
    return funcamp.make_train_step(loss, adamw, funcamp.ScalerConfig(2.0**8), policy=policy, **options)


def broken(number: int, ranks: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """This rank's part of a batch, infinite on some ranks."""
    x, y = mine(batch(number, 8))
    return (x * torch.inf if rank() in ranks else x), y


@case(2)
def the_state_is_that_of_one_process() -> None:
    for shard in (False, True):
        parallel = distributed.DataParallel(shard=shard)
        step, alone = made(parallel=parallel), made()
        state, expected = step.init(), alone.init()
        for number in range(4):
            state, _ = step(state, mine(batch(number, 8)))
            expected, _ = alone(expected, batch(number, 8))
            if number == 0:  # later the order of sums makes last bits of the parameters differ
                assert_same(state.float8, expected.float8)
            assert_equal_on_all_ranks(state.float8)
        assert_close(tuple(state.float8), tuple(expected.float8), 0.05)


@case(2)
def an_overflow_on_one_rank_leaves_no_trace_on_any() -> None:
    step = made(parallel=distributed.DataParallel())
    state, _ = step(step.init(), mine(batch(0, 8)))
    after, metrics = step(state, broken(1, (1,)))
    assert metrics.found_inf == 1
    assert_same((after.float8, after.params), (state.float8, state.params))


@case(2)
def a_rank_without_a_share_changes_nothing() -> None:
    step, alone = made(parallel=distributed.DataParallel(), weight=lambda _: 1.0 - rank()), made()
    state, metrics = step(step.init(), broken(0, (1,)))
    assert metrics.found_inf == 0
    x, y = batch(0, 8)
    expected, _ = alone(alone.init(), (x[:4], y[:4]))
    assert_same(state.float8, expected.float8)


@case(2)
def the_amaxes_take_one_collective() -> None:
    counts = []
    for policy in ("float8", POLICY):
        step = made(policy, parallel=distributed.DataParallel())
        counts.append(called(step, step.init(), mine(batch(0, 8))))
    assert counts[1] - counts[0] == {"all_reduce": 1}
