"""The flag over ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import funcamp
from funcamp import distributed
from tests.distributed.ranks import case
from tests.distributed.ranks.tools import called, collectives, rank, world


def judged(reduce: Callable[[Tensor], Tensor], bad: bool, **kwargs: Any) -> Tensor:
    def check(state: funcamp.ScalerState, grads: Any) -> Tensor:
        _, state = funcamp.unscale_and_check(state, grads, reduce=reduce)
        return state.found_inf

    grads = [torch.ones(3), torch.full((2,), float("inf") if bad else 1.0)]
    found: Tensor = torch.compile(check, fullgraph=True, **kwargs)(funcamp.init(), grads)
    assert torch.equal(found, check(funcamp.init(), grads)), "eager and compiled differ"
    assert type(found) is Tensor
    assert type(check(funcamp.init(), grads)) is Tensor
    return found


@case(2, 4)
def an_overflow_on_one_rank_is_found_on_all() -> None:
    reduce = distributed.max_over()
    assert judged(reduce, False, backend="aot_eager") == 0.0
    for culprit in range(world()):
        assert judged(reduce, rank() == culprit, backend="aot_eager") == 1.0


@case(2)
def one_collective_for_any_number_of_gradients() -> None:
    reduce = distributed.max_over()

    def check(state: funcamp.ScalerState, grads: Any) -> funcamp.ScalerState:
        return funcamp.unscale_and_check(state, grads, reduce=reduce)[1]

    for count in (1, 2, 40):
        grads = [torch.ones(3) for _ in range(count)]
        assert called(check, funcamp.init(), grads) == {"all_reduce": 1}
    assert collectives(check, funcamp.init(), grads) == {"all_reduce": 1}


@case(4)
def data_tensor_and_pipeline_groups_at_once() -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "tp", "pp"))
    for culprit in range(world()):
        for reduce in (distributed.max_over(mesh), distributed.max_over(mesh["dp"], mesh["pp"].get_group())):
            assert judged(reduce, rank() == culprit, backend="aot_eager") == 1.0
    # Of one dimension, those ranks alone.
    row, found = rank() // 2, distributed.max_over(mesh["pp"])(torch.tensor(float(rank() == 3)))
    assert found == float(row == 1)


@case(4)
def a_group_that_lacks_this_process_is_refused() -> None:
    pair = dist.new_group([0, 1])
    with pytest.raises(ValueError, match="group must contain this process") if rank() > 1 else nullcontext():
        distributed.max_over(pair)


@case(2)
def bad_groups_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 1))
    parallel: Any = distributed.DataParallel
    wrong: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (
            lambda: distributed.max_over("all"),  # type: ignore[arg-type]
            TypeError,
            "group must be a ProcessGroup, a DeviceMesh or None; got 'all'",
        ),
        (lambda: parallel(mesh), ValueError, "group must be a mesh of one dimension"),
        (lambda: parallel(dtype="bfloat16"), TypeError, "dtype must be a torch.dtype"),
        (lambda: parallel(dtype=torch.int32), ValueError, "dtype must be a floating-point type"),
        (lambda: parallel(shard=1), TypeError, "shard must be True or False; got 1"),
    ]
    for make, kind, message in wrong:
        with pytest.raises(kind, match=message):
            make()
