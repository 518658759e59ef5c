"""DTensors: the flag of parts is the flag of the whole, whatever the placements and meshes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import funcamp
from tests.distributed.ranks import case
from tests.distributed.ranks.tools import collectives, rank, world
from tests.support.helpers import assert_same, difference

LOW = funcamp.ScalerConfig(init_scale=8.0, growth_interval=3)


def full(tree: Any) -> Any:
    return torch.utils._pytree.tree_map_only(DTensor, lambda leaf: leaf.full_tensor(), tree)


def identity(fn: Any) -> Any:
    return fn


def mixed(mesh: DeviceMesh) -> dict[str, tuple[DTensor, Tensor]]:
    """DTensors of every placement, a replica first, with what they are together."""
    values: dict[str, tuple[Tensor, list[Any]]] = {
        "replica": (torch.arange(6.0), [Replicate()]),
        "rows": (torch.arange(12.0).view(6, 2), [Shard(0)]),
        "uneven": (torch.arange(5.0), [Shard(0)]),
        "columns": (torch.arange(8.0).view(2, 4), [Shard(1)]),
        "one": (torch.ones(1), [Shard(0)]),
    }
    spread = mesh.ndim - 1
    found: dict[str, Any] = {}
    for name, (value, placements) in values.items():
        found[name] = (distribute_tensor(value, mesh, [*[Replicate()] * spread, *placements]), value)
    part = DTensor.from_local(torch.full((3,), float(rank())), mesh, [Partial()] * mesh.ndim, run_check=False)
    found["sum"] = (part, torch.full((3,), float(sum(range(world())))))
    return found


def poisoned(leaves: dict[str, tuple[DTensor, Tensor]]) -> Iterator[tuple[str, dict[str, DTensor]]]:
    """The DTensors with an infinity in the first element of one, or in the last, one after the other."""
    for name, (leaf, _) in leaves.items():
        for place in (0, -1):
            bad: Any = leaf.clone()
            part = bad.to_local()
            if rank() == (0 if place == 0 else world() - 1) and part.numel():
                part.view(-1)[place] = float("inf")
            yield name, {other: bad if other == name else value for other, (value, _) in leaves.items()}


def meshes() -> list[DeviceMesh]:
    one = init_device_mesh("cpu", (world(),), mesh_dim_names=("all",))
    return [one, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))] if world() == 4 else [one]


def checked(state: funcamp.ScalerState, grads: Any) -> tuple[Any, funcamp.ScalerState]:
    return funcamp.unscale_and_check(state, grads)


def compiled(fn: Any) -> Any:
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


@case(2, 4)
def unscaling_and_norms_are_those_of_the_whole() -> None:
    found = meshes()
    for mesh in found:
        leaves = mixed(mesh)
        grads = {name: leaf for name, (leaf, _) in leaves.items()}
        whole = {name: value for name, (_, value) in leaves.items()}
        state = funcamp.init(LOW)
        expected, _ = funcamp.unscale_and_check(state, whole)
        _, expected_norm = funcamp.clip_grad_norm(expected, 1.0)
        for run in (identity, compiled) if mesh is found[-1] else (identity,):  # two ranks compile for one dimension
            got, after = run(checked)(state, grads)
            assert_same(full(got), expected)
            assert type(after.found_inf) is Tensor
            assert after.found_inf == 0.0
            clipped, norm = run(lambda tree: funcamp.clip_grad_norm(tree, 1.0))(got)
            assert type(norm) is Tensor
            torch.testing.assert_close(norm, expected_norm)
            assert difference(full(clipped), funcamp.clip_grad_norm(expected, 1.0)[0]) < 1e-6
            assert run(funcamp.all_finite)(grads)


@case(2, 4)
def an_infinity_in_any_part_of_any_tensor_is_found_on_all_ranks() -> None:
    for mesh in meshes():
        for name, grads in poisoned(mixed(mesh)):
            _, state = funcamp.unscale_and_check(funcamp.init(LOW), grads)
            expected = _somewhere(grads)
            assert state.found_inf == float(expected), f"{name} on rank {rank()}"
            assert funcamp.all_finite(grads) == (not expected)
            flags = funcamp.found_inf_by_leaf(grads)
            assert [leaf for leaf, flag in zip(funcamp.leaf_names(grads), flags.tolist()) if flag] == [name] * expected


def _somewhere(grads: dict[str, DTensor]) -> bool:
    """The oracle: every part of every tensor, gathered as plain numbers."""
    bad = torch.tensor(float(any(not leaf.to_local().isfinite().all() for leaf in grads.values())))
    torch.distributed.all_reduce(bad)
    return bool(bad > 0)


@case(2)
def compiled_finds_it_too() -> None:
    run = compiled(checked)
    for name, grads in poisoned(mixed(meshes()[0])):
        assert run(funcamp.init(LOW), grads)[1].found_inf == float(_somewhere(grads)), name


@case(4)
def tensors_on_two_meshes() -> None:
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = whole["dp"], whole["tp"]
    for culprit in range(world()):
        for on_dp in (True, False):
            a = DTensor.from_local(torch.ones(2), dp, [Shard(0)], run_check=False)
            b = DTensor.from_local(torch.ones(2), tp, [Shard(0)], run_check=False)
            if rank() == culprit:
                (a if on_dp else b).to_local()[0] = float("nan")
            for grads in ([a, b], [b, a]):
                for run in (identity, compiled):
                    assert run(checked)(funcamp.init(), grads)[1].found_inf == 1.0
                scaler, optimizer = funcamp.GradScaler("cpu"), torch.optim.SGD([nn.Parameter(g) for g in grads])
                for param, grad in zip(optimizer.param_groups[0]["params"], grads):
                    param.grad = grad.clone()
                scaler.scale(torch.ones(()))
                scaler.unscale_(optimizer)
                found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
                assert next(iter(found.values())) == 1.0


@case(2)
def collectives_do_not_grow_with_the_number_of_gradients() -> None:
    mesh = meshes()[0]
    for count in (1, 30):
        grads = [distribute_tensor(torch.ones(4), mesh, [Shard(0)]) for _ in range(count)]
        assert collectives(checked, funcamp.init(), grads) == {"all_reduce": 1}


class Mlp(nn.Module):
    """Its weights are DTensors, gathered where they are used; their gradients are scattered."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Parameter(torch.randn(16, 8) * 0.3), nn.Parameter(torch.randn(4, 16) * 0.3)
        self.bias = nn.Parameter(torch.zeros(16))

    @staticmethod
    def of(params: dict[str, Any], x: Tensor) -> Any:
        values = {name: _whole(value) for name, value in params.items()}
        return torch.tanh(x @ values["up"].t() + values["bias"]) @ values["down"].t()


def _whole(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    replicas = value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
    whole: Tensor = replicas.to_local(grad_placements=[Partial()] * value.device_mesh.ndim)
    return whole


@case(2, 4)
def a_step_on_the_users_own_dtensors_equals_one_process() -> None:
    for run in (identity, funcamp.jit):
        sharded_state(run)


def sharded_state(run: Callable[[Any], Any]) -> None:
    """FSDP by hand: parameters, moments and gradients are parts, gathered in the forward pass."""

    def loss_fn(params: Any, batch: Any) -> Tensor:
        x, y, share = batch
        loss: Tensor = nn.functional.cross_entropy(Mlp.of(params, x).float(), y) * share
        return loss

    config = funcamp.ScalerConfig(init_scale=2.0**30, growth_factor=128.0, backoff_factor=1 / 128, growth_interval=3)
    adamw = funcamp.stateless(torch.optim.AdamW, lr=1e-2)
    step = funcamp.make_train_step(
        funcamp.loss(loss_fn, engine="autograd"),
        adamw,
        config,
        policy="float16",
        max_norm=1.0,
    )
    whole = {name: param.detach() for name, param in Mlp().named_parameters()}
    for mesh in meshes():
        rows = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
        params = {name: distribute_tensor(value, mesh, rows) for name, value in whole.items()}
        state, expected = step.init(params, flat=False), step.init(whole, flat=False)
        made = run(step)
        for number in range(12):
            torch.manual_seed(number)
            x, y = torch.randn(16, 8), torch.randint(4, (16,))
            part = (x.chunk(world())[rank()], y.chunk(world())[rank()], torch.tensor(1 / world()))
            state, metrics = made(state, part)
            expected, expected_metrics = step(expected, (x, y, torch.tensor(1.0)))
            assert metrics.found_inf == expected_metrics.found_inf
            assert metrics.scale == expected_metrics.scale
        assert difference(full(state.params), expected.params) < 0.02
        assert_same(state.scaler, expected.scaler)
        assert expected.skipped > 0


@case(2)
def no_state_takes_the_place_of_a_module_of_dtensors() -> None:
    model = nn.Linear(4, 4)
    whole = model.weight.detach().clone()
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), meshes()[0], [Shard(0)]))
    loss_fn = funcamp.module_loss(model, nn.functional.mse_loss)
    step = funcamp.make_train_step(loss_fn, funcamp.stateless(torch.optim.SGD))
    with pytest.raises(TypeError, match=r"init: consume must be False .*'weight' is a DTensor"):
        step.init(flat=False, consume=True)
    assert isinstance(model.weight, DTensor)
    assert_same(model.weight.full_tensor().detach(), whole)
