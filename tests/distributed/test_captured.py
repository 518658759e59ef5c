"""A sharded step that is captured, in a group of one: the fake group of four leaves results unwritten on torch 2.11."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

import funcamp
from funcamp.distributed import DataParallel
from tests.support.helpers import assert_same
from tests.support.models import mlp
from tests.support.stand_in import StandIn
from tests.support.steps import build


@pytest.fixture(scope="module", autouse=True)
def only_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def locals_of(state: Any) -> Any:
    """A state with this rank's parts of its DTensors."""
    return _pytree.tree_map_only(DTensor, DTensor.to_local, state)


@pytest.mark.parametrize("donate", [True, False])
def test_another_sharded_state_is_copied_into_a_captured_step(donate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    StandIn().take_place(monkeypatch)
    step = build(mlp(), funcamp.stateless(torch.optim.AdamW), parallel=DataParallel(shard=True))
    run = funcamp.jit(step, backend="eager", donate=donate)
    batch = mlp().batch(0)
    first, _ = run(step.init(), batch)
    other, _ = run(step.init(), batch)
    kept = funcamp.clone(other)
    assert_same(locals_of(first), locals_of(other))
    run(other, batch)
    assert_same(locals_of(first), locals_of(kept))
