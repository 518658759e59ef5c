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
from torch.distributed.device_mesh import init_device_mesh

import funcamp
from funcamp import distributed
from tests.distributed.ranks import case
from tests.distributed.ranks.step import LOW, made
from tests.distributed.ranks.tools import assert_equal_on_all_ranks, rank, world
from tests.support.helpers import assert_same
from tests.support.models import mlp


def shared_folder() -> Path:
    """A folder that every rank knows."""
    names = [tempfile.mkdtemp() if rank() == 0 else ""]
    dist.broadcast_object_list(names, 0)
    return Path(names[0])


def step_of(*group: Any, **options: Any) -> Any:
    return made(mlp(), LOW, parallel=distributed.DataParallel(*group, **options), ema_decay=0.9)


def trained(step: Any) -> Any:
    """A state after three steps, with moments and an average."""
    state = step.init()
    for number in range(3):
        state, _ = step(state, mlp().batch(number))
    assert state.skipped == 0
    return state


def saved(state: Any, group: Any = None) -> Path:
    path = shared_folder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(distributed.sharded_state_dict(state), checkpoint_id=path, process_group=group)
    return path


def loaded(like: Any, path: Path, *options: Any, **others: Any) -> Any:
    values = distributed.sharded_state_dict(like)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(values, *options, checkpoint_id=path, **others)
    return distributed.load_sharded_state_dict(values, like)


@case(2, 4)
def a_state_goes_on_sharded_or_not_and_on_another_number_of_ranks() -> None:
    steps = [step_of(), step_of(shard=True), made(mlp(), LOW, ema_decay=0.9)]
    if world() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        # Of the second mesh every rank has a half of the state, as on two ranks.
        steps += [step_of(mesh, shard=True), step_of(mesh["shards"], shard=True)]
    batch = torch.ones(4, 8), torch.zeros(4, dtype=torch.int64)
    for step in steps[:4:2] + steps[1:2]:
        state = trained(step)
        path, full = saved(state), distributed.gather_state(state)
        back = loaded(step.init(), path)
        assert_same(back, state)
        assert_same(step(back, batch)[0], step(state, batch)[0])
        for other in steps:
            assert_same(distributed.gather_state(loaded(other.init(), path)), full)


@case(2)
def plain_names_pass_between_sharded_and_full_states() -> None:
    sharded, alone = step_of(shard=True), made(mlp(), LOW, ema_decay=0.9)
    state = trained(sharded)
    names = sharded.state_dict(state)
    assert_equal_on_all_ranks(names)
    full = alone.load_state_dict(names, like=alone.init())
    assert_same(full, distributed.gather_state(state))
    assert_same(sharded.load_state_dict(alone.state_dict(full), like=sharded.init()), state)
    of_biases = [name for name in names if name.startswith("opt_state.state.step.") and name.endswith("bias")]
    names[of_biases[0]] = names[of_biases[0]] - 1
    with pytest.raises(ValueError, match="saved must hold one count for all parameters"):
        sharded.load_state_dict(names, like=sharded.init())


@case(2)
def what_is_no_saved_state_of_these_parameters_is_refused() -> None:
    for shard in (False, True):
        parallel = distributed.DataParallel(shard=shard)
        sgd = funcamp.stateless(torch.optim.SGD)
        step = funcamp.make_train_step(lambda p, x: (p["a"] * x + p["b"]).sum(), sgd, parallel=parallel)
        first = step.init({"a": torch.zeros(2, 2), "b": torch.ones(2, 2)})
        other = step.init({"b": torch.zeros(2, 2), "a": torch.ones(2, 2)})
        values = distributed.sharded_state_dict(first)
        for wrong, like, message in (
            (values, other, "got another layout"),
            ({**values, "scaler.scale": torch.ones(2)}, first, r"'scaler.scale'\] must be like a torch.float32 tensor"),
            ({}, first, "saved must be what sharded_state_dict"),
        ):
            with pytest.raises(ValueError, match=message):
                distributed.load_sharded_state_dict(wrong, like)
    for call in (distributed.gather_state, distributed.sharded_state_dict):
        with pytest.raises(TypeError, match="state must be a TrainState"):
            call(values)  # type: ignore[arg-type]
