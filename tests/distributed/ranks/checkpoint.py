"""States saved by torch.distributed.checkpoint and restored on another number of ranks, bit for bit."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import funcamp
from funcamp import distributed
from tests.distributed.ranks import case
from tests.distributed.ranks.step import made
from tests.distributed.ranks.tools import assert_equal_on_all_ranks, rank, world
from tests.support.helpers import assert_same
from tests.support.models import mlp


def shared_folder() -> Path:
    """A folder that every rank knows."""
    names = [tempfile.mkdtemp() if rank() == 0 else ""]
    dist.broadcast_object_list(names, 0)
    return Path(names[0])


def trained(step: Any, seed: int = 0) -> Any:
    """A state after three steps, with moments and an average."""
    state = step.init()
    for number in range(3):
        generator = torch.Generator().manual_seed(seed + number)
        x, y = torch.randn(4, 8, generator=generator), torch.randint(4, (4,), generator=generator)
        state, _ = step(state, (x, y))
    assert state.skipped == 0
    return state


def saved(state: Any, path: Path, group: Any = None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(distributed.sharded_state_dict(state), checkpoint_id=path, process_group=group)


def loaded(like: Any, path: Path, group: Any = None) -> Any:
    values = distributed.sharded_state_dict(like)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(values, checkpoint_id=path, process_group=group)
    return distributed.load_sharded_state_dict(values, like)


LOW = funcamp.ScalerConfig(init_scale=8.0)


@case(2, 4)
def a_state_comes_back_on_as_many_ranks() -> None:
    for shard in (False, True):
        step = made(mlp(), LOW, parallel=distributed.DataParallel(shard=shard), ema_decay=0.9)
        state, path = trained(step), shared_folder()
        saved(state, path)
        back = loaded(step.init(), path)
        assert_same(back, state)
        batch = (torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))
        assert_same(step(back, batch)[0], step(state, batch)[0])


@case(4)
def a_state_comes_back_on_fewer_and_on_more_ranks() -> None:
    pair = dist.new_group([0, 1])
    for shard in (False, True):
        large = made(mlp(), LOW, parallel=distributed.DataParallel(shard=shard), ema_decay=0.9)
        state, path = trained(large), shared_folder()
        saved(state, path)
        whole = distributed.gather_state(state)
        smaller_path = shared_folder()
        if rank() < 2:
            small = made(mlp(), LOW, parallel=distributed.DataParallel(pair, shard=shard), ema_decay=0.9)
            fewer = loaded(small.init(), path, pair)
            assert_same(distributed.gather_state(fewer), whole)
            if shard:
                assert fewer.params.groups[0].numel() >= 2 * state.params.groups[0].numel() - 1
            saved(fewer, smaller_path, pair)
        dist.barrier()
        assert_same(distributed.gather_state(loaded(large.init(), smaller_path)), whole)


@case(2)
def plain_names_pass_between_cut_and_whole_states() -> None:
    cut = made(mlp(), LOW, parallel=distributed.DataParallel(shard=True), ema_decay=0.9)
    alone = made(mlp(), LOW, ema_decay=0.9)
    state = trained(cut)
    names = cut.state_dict(state)
    assert_equal_on_all_ranks(names)
    whole = alone.load_state_dict(names, like=alone.init())
    assert_same(whole, distributed.gather_state(state))
    assert_same(cut.load_state_dict(alone.state_dict(whole), like=cut.init()), state)


@case(2)
def counts_that_differ_in_a_group_are_refused_in_slices() -> None:
    cut = made(mlp(), LOW, parallel=distributed.DataParallel(shard=True))
    names = cut.state_dict(trained(cut))
    of_biases = [name for name in names if name.startswith("opt_state.state.step.") and name.endswith("bias")]
    assert len(of_biases) > 1  # in one group
    names[of_biases[0]] = names[of_biases[0]] - 1
    with pytest.raises(ValueError, match="saved must hold one count for all parameters"):
        cut.load_state_dict(names, like=cut.init())


@case(2)
def what_is_no_saved_state_is_refused() -> None:
    step = made(mlp(), LOW, parallel=distributed.DataParallel(shard=True))
    state: Any = step.init()
    values = distributed.sharded_state_dict(state)
    del values["step"]
    with pytest.raises(ValueError, match="saved must be what sharded_state_dict"):
        distributed.load_sharded_state_dict(values, state)
    for call in (distributed.gather_state, distributed.sharded_state_dict):
        with pytest.raises(TypeError, match="state must be a TrainState"):
            call(values)  # type: ignore[arg-type]


@case(2)
def a_state_of_other_parameters_is_refused() -> None:
    def step_of(shard: bool) -> funcamp.TrainStep:
        return funcamp.make_train_step(
            lambda p, x: (p["a"] * x).sum() + p["b"].sum(),
            funcamp.stateless(torch.optim.SGD),
            parallel=distributed.DataParallel(shard=shard),
        )

    for shard in (False, True):
        step = step_of(shard)
        first = step.init({"a": torch.zeros(2, 2), "b": torch.ones(2, 2)})
        other = step.init({"b": torch.zeros(2, 2), "a": torch.ones(2, 2)})
        with pytest.raises(ValueError, match="got another layout"):
            distributed.load_sharded_state_dict(distributed.sharded_state_dict(first), other)
        values = distributed.sharded_state_dict(first)
        values["scaler.scale"] = torch.ones(2)
        with pytest.raises(ValueError, match=r"'scaler.scale'\] must be like a torch.float32 tensor"):
            distributed.load_sharded_state_dict(values, first)


@case(4)
def every_rank_holds_its_part_only() -> None:
    step = made(mlp(), LOW, parallel=distributed.DataParallel(shard=True))
    values = distributed.sharded_state_dict(step.init())
    parts = [value for name, value in values.items() if name.startswith("params.")]
    assert parts
    for part in parts:
        local: Any = part
        assert local.to_local().numel() <= -(-part.numel() // world())
