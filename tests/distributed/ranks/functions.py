"""The functions on gradients of several ranks: the flag over groups, and DTensors of any placement on any mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import funcamp
from funcamp import distributed
from tests.distributed.ranks.tools import full, meshes, rank, square, world
from tests.support.helpers import assert_same, difference
from tests.support.steps import compiled, eager

LOW = funcamp.ScalerConfig(init_scale=8.0)


def test_max_over_finds_an_overflow_of_any_rank() -> None:
    reductions = [distributed.max_over()]
    if world() == 4:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "tp", "pp"))
        reductions += [distributed.max_over(mesh), distributed.max_over(mesh["dp"], mesh["pp"].get_group())]
        of_a_row = distributed.max_over(mesh["pp"])(torch.tensor(float(rank() == 3)))
        assert of_a_row == float(rank() >= 2)
    for reduce in reductions:

        def flag(grads: Any, reduce: Any = reduce) -> Tensor:
            return funcamp.unscale_and_check(funcamp.init(), grads, reduce=reduce)[1].found_inf

        for run in (eager, compiled):
            call = run(flag)
            for culprit in range(-1, world()):
                found = call([torch.ones(3), torch.full((2,), torch.inf if rank() == culprit else 1.0)])
                assert type(found) is Tensor
                assert found == float(culprit >= 0)


def mixed(mesh: DeviceMesh) -> dict[str, tuple[DTensor, Tensor]]:
    """DTensors of every placement, a replica first, with what they are together."""
    values: dict[str, tuple[Tensor, Any]] = {
        "replica": (torch.arange(6.0), Replicate()),
        "rows": (torch.arange(12.0).view(6, 2), Shard(0)),
        "uneven": (torch.arange(5.0), Shard(0)),
        "columns": (torch.arange(8.0).view(2, 4), Shard(1)),
        "one": (torch.ones(1), Shard(0)),
    }
    others = [Replicate()] * (mesh.ndim - 1)
    found = {name: (distribute_tensor(value, mesh, [*others, last]), value) for name, (value, last) in values.items()}
    part = DTensor.from_local(torch.full((3,), float(rank())), mesh, [Partial()] * mesh.ndim, run_check=False)
    return {**found, "sum": (part, torch.full((3,), float(sum(range(world())))))}


def unscaled(grads: Any) -> tuple[Any, funcamp.ScalerState]:
    return funcamp.unscale_and_check(funcamp.init(LOW), grads)


def clipped(grads: Any) -> tuple[Any, Tensor]:
    return funcamp.clip_grad_norm(grads, 1.0)


def test_unscaling_and_norms_are_those_of_the_whole() -> None:
    for mesh in meshes():
        grads, whole = ({name: pair[place] for name, pair in mixed(mesh).items()} for place in (0, 1))
        expected, _ = unscaled(whole)
        expected_clipped, expected_norm = clipped(expected)
        for run in (eager, compiled):
            got, after = run(unscaled)(grads)
            assert_same(full(got), expected)
            small, norm = run(clipped)(got)
            assert type(after.found_inf) is type(norm) is Tensor
            assert after.found_inf == 0.0
            torch.testing.assert_close(norm, expected_norm)
            assert difference(full(small), expected_clipped) < 1e-6
            assert run(funcamp.all_finite)(grads)


def poisoned(mesh: DeviceMesh) -> Iterator[tuple[str, dict[str, DTensor]]]:
    """These DTensors with an infinity in the first element of one, or in the last, one after the other."""
    leaves = {name: leaf for name, (leaf, _) in mixed(mesh).items()}
    for name, leaf in leaves.items():
        for place, culprit in ((0, 0), (-1, world() - 1)):
            bad: Any = leaf.clone()
            part = bad.to_local()
            if rank() == culprit and part.numel():
                part.view(-1)[place] = torch.inf
            yield name, {**leaves, name: bad}


def flag_of_the_class(grads: list[Any]) -> Tensor:
    """The flag of the GradScaler for parameters with these gradients."""
    params = [nn.Parameter(grad) for grad in grads]
    for param, grad in zip(params, grads):
        param.grad = grad.clone()
    scaler = funcamp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(params))
    return scaler.metrics().found_inf


def test_an_infinity_in_any_part_of_any_tensor_is_found_on_all_ranks() -> None:
    for mesh in meshes():
        run = compiled(unscaled)
        for name, grads in poisoned(mesh):
            bad = torch.tensor(float(any(not leaf.to_local().isfinite().all() for leaf in grads.values())))
            dist.all_reduce(bad, dist.ReduceOp.MAX)  # every part of every tensor, as plain numbers
            for found in (unscaled(grads)[1].found_inf, run(grads)[1].found_inf, flag_of_the_class([*grads.values()])):
                assert found == bad, f"{name} on rank {rank()}"
            assert funcamp.all_finite(grads) == (not bad)
            flags = dict(zip(funcamp.leaf_names(grads), funcamp.found_inf_by_leaf(grads).tolist()))
            assert flags == {leaf: bad.item() * (leaf == name) for leaf in grads}


@pytest.mark.ranks(n=4)
def test_tensors_on_two_meshes_have_one_flag() -> None:
    for culprit in range(world()):
        for bad in range(2):
            grads: list[Any] = [
                DTensor.from_local(torch.ones(2), square()[name], [Shard(0)], run_check=False)
                for name in ("rows", "columns")
            ]
            if rank() == culprit:
                grads[bad].to_local()[0] = torch.nan
            for order in (grads, grads[::-1]):
                for run in (eager, compiled):
                    assert run(unscaled)(order)[1].found_inf == 1.0
                assert flag_of_the_class(order) == 1.0


@pytest.mark.ranks(n=2)
def test_torch_misses_an_overflow_behind_a_replica() -> None:
    """The reason for a rule of our own: when this fails, torch's can take its place."""
    (mesh,) = meshes()
    replica = distribute_tensor(torch.ones(2), mesh, [Replicate()])
    shard = DTensor.from_local(torch.full((2,), torch.inf if rank() else 1.0), mesh, run_check=False)
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([replica, shard], found, torch.ones(()))
    assert found == float(rank() == 1)
