"""Layers in float8 over ranks: each rank scales its own tensors, and an overflow of one skips on all."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import funcamp
from funcamp import distributed
from tests.distributed.ranks import case
from tests.distributed.ranks.tools import assert_equal_on_all_ranks, mine, rank
from tests.float8.models import batch, converted
from tests.support.helpers import assert_close, assert_same


def made(**options: bool) -> funcamp.TrainStep:
    loss = funcamp.module_loss(converted(), F.cross_entropy)
    adamw = funcamp.stateless(torch.optim.AdamW, lr=1e-2)
    parallel = distributed.DataParallel(**options)  # type: ignore[arg-type]
    return funcamp.make_train_step(loss, adamw, funcamp.ScalerConfig(2.0**8), policy="bfloat16", parallel=parallel)


def broken(number: int) -> tuple[Tensor, Tensor]:
    """This rank's part of a batch, infinite on the second rank."""
    x, y = mine(batch(number, 8))
    return (x * torch.inf if rank() == 1 else x), y


@case(2)
def sharded_or_not_the_step_is_the_same_and_an_overflow_on_one_rank_skips_on_all() -> None:
    ends = []
    for shard in (False, True):
        step = made(shard=shard)
        for run in (step, funcamp.jit(step, backend="eager", donate=False)):
            state, metrics = run(step.init(), mine(batch(0, 8)))
            assert metrics.found_inf == 0
            ends.append((step.state_dict(state)["params.head.weight"], metrics.loss))
            after, metrics = run(state, broken(1))
            assert metrics.found_inf == 1
            assert_same(after.params, state.params)
            assert_equal_on_all_ranks(after.scaler)
    for end in ends[1:]:
        assert_close(end, ends[0], 1e-3)
