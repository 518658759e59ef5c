"""funcamp.GradScaler and the functional core in loops that torch distributes: DDP, FSDP2, tensor parallelism."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import funcamp
from tests.distributed.ranks import case
from tests.distributed.ranks.checkpoint import shared_folder
from tests.distributed.ranks.tools import assert_equal_on_all_ranks, mine, rank, world
from tests.support.helpers import assert_same, clone, difference

#: Growth and backoff by 128, for the reason that tests/distributed/ranks/step.py gives.
RULE = {"growth_factor": 128.0, "backoff_factor": 1 / 128, "growth_interval": 3}
SCALER: dict[str, Any] = {"init_scale": 2.0**30, **RULE}
STEPS = 12
Loop = tuple[nn.Module, list[tuple[float, bool]]]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 4))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 8, generator=generator), torch.randint(4, (16,), generator=generator)


def train(
    wrapped: nn.Module,
    scaler: torch.amp.GradScaler,
    split: Callable[[Any], Any],
    *,
    fused: bool = False,
    clip: bool = False,
    poison: Callable[[int], bool] = lambda _: False,
) -> list[tuple[float, bool]]:
    """The scale before each step, and whether it was skipped."""
    adamw = torch.optim.AdamW(wrapped.parameters(), lr=1e-2, fused=fused)
    seen = []
    for number in range(STEPS):
        x, y = split(batch(number))
        if poison(number):
            x = x * float("inf")
        adamw.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(wrapped(x).float(), y)
        before = [full(param).clone() for param in wrapped.parameters()]
        scale = scaler.get_scale() if number else SCALER["init_scale"]
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(adamw)
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        scaler.step(adamw)
        scaler.update()
        skipped = all(torch.equal(full(param), old) for param, old in zip(wrapped.parameters(), before))
        seen.append((scale, skipped))
    return seen


def full(param: Any) -> Tensor:
    tensor: Tensor = (param.full_tensor() if isinstance(param, DTensor) else param).detach()
    return tensor


def agree(wrapped: nn.Module, split: Callable[[Any], Any], **options: Any) -> None:
    """funcamp's class in a distributed loop against torch's own class in one process."""
    alone = model()
    with torch.random.fork_rng():
        expected = train(alone, torch.amp.GradScaler("cpu", **SCALER), lambda whole: whole, **options)
    seen = train(wrapped, funcamp.GradScaler("cpu", **SCALER), split, **options)
    assert seen == expected
    assert {skipped for _, skipped in seen} == {True, False}
    params = [full(param) for param in wrapped.parameters()]
    assert_equal_on_all_ranks(params)
    assert difference(params, [param.detach() for param in alone.parameters()]) < 0.02


@case(2, 4)
def ddp_equals_one_process() -> None:
    for options in ({}, {"clip": True}, {"fused": True}):
        agree(nn.parallel.DistributedDataParallel(model()), mine, **options)


def sharded(mesh: DeviceMesh) -> nn.Module:
    wrapped = model()
    for layer in wrapped:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(wrapped, mesh=mesh)
    return wrapped


@case(2, 4)
def fsdp2_equals_one_process() -> None:
    for options in ({}, {"clip": True}, {"fused": True}):
        agree(sharded(init_device_mesh("cpu", (world(),))), mine, **options)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(nn.functional.silu(self.up(self.norm(x))))
        return x + hidden


class Titan:
    """A run in torchtitan's style: every block compiled and sharded, float16 without autocast, float32 sums."""

    def __init__(self, scaler: torch.amp.GradScaler, fused: bool) -> None:
        torch.manual_seed(0)
        precision = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cpu", (world(),))
        self.model: Any = nn.Sequential(nn.Linear(8, 16), Block(16), Block(16), nn.Linear(16, 4))
        for block in list(self.model)[1:3]:
            block.compile(backend="aot_eager", fullgraph=True)
            fully_shard(block, mesh=mesh, mp_policy=precision)
        fully_shard(self.model, mesh=mesh, mp_policy=precision)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=fused)
        self.scaler, self.taken = scaler, 0
        self.seen: list[Any] = []

    def train(self, last: int) -> Titan:
        """Accumulate two micro-batches a step; keep what every step leaves."""
        while self.taken < last:
            self.optimizer.zero_grad()
            for part in range(2):
                x, y = mine(batch(2 * self.taken + part))
                self.model.set_requires_gradient_sync(part == 1)
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # Dynamo's
                    loss = nn.functional.cross_entropy(self.model(x).float(), y) / 2
                self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.taken += 1
            params = clone([param.to_local() for param in self.model.parameters()])
            self.seen.append((params, full(norm), self.scaler.state_dict()))
        return self

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict(), "taken": self.taken}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        model, optimizer = saved["model"], saved["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.scaler.load_state_dict(saved["scaler"])
        self.taken = saved["taken"]


MAKERS: tuple[Any, ...] = (torch.amp.GradScaler, funcamp.GradScaler)


@case(2)
def torchtitans_style_equals_torchs_scaler() -> None:
    for fused in (False, True):
        expected, actual = (Titan(make("cpu", **SCALER), fused).train(STEPS).seen for make in MAKERS)
        scales = [scaler["scale"] for _, _, scaler in expected]
        assert any(b < a for a, b in itertools.pairwise(scales)), scales
        assert any(b > a for a, b in itertools.pairwise(scales)), scales
        assert_same(actual, expected)


@case(2)
def torchtitans_style_resumes_from_torchs_checkpoint_with_the_other_scaler() -> None:
    for first, second in (MAKERS, MAKERS[::-1]):
        run, folder = Titan(first("cpu", **SCALER), fused=True).train(STEPS // 2), shared_folder()
        save(run.state_dict(), checkpoint_id=folder)
        after = Titan(second("cpu"), fused=True)
        saved = after.state_dict()
        load(saved, checkpoint_id=folder)
        after.load_state_dict(saved)
        assert_same(after.train(STEPS).seen, run.train(STEPS).seen[STEPS // 2 :])


@case(4)
def hybrid_fsdp2_equals_one_process() -> None:
    agree(sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))), mine)


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    """A replica first: torch's own rule takes the first gradient's ranks for all."""
    wrapped = model()
    last: Any = wrapped[4]
    parallelize_module(wrapped, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for name, param in list(last.named_parameters()):
        setattr(last, name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Replicate()])))
    return wrapped


class TensorParallel(nn.Module):
    """Its last layer on replicas, which come first among its parameters."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        wrapped: Any = tensor_parallel(mesh)
        self.mesh, self.last = mesh, wrapped[4]
        self.first, self.middle = wrapped[0], wrapped[2]

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.first(x))))
        out: Any = self.last(DTensor.from_local(hidden, self.mesh, [Replicate()]))
        result: Tensor = out.to_local()
        return result


@case(2)
def tensor_parallel_overflows_are_found_on_all_ranks() -> None:
    mesh = init_device_mesh("cpu", (world(),))
    for culprit in range(world()):
        wrapped = TensorParallel(mesh)
        sgd = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        placements = {str(param.placements) for param in wrapped.parameters() if isinstance(param, DTensor)}
        assert len(placements) == 3, placements
        scaler = funcamp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(wrapped(batch(0)[0]).square().mean()).backward()
        grad: Any = wrapped.first.weight.grad
        if rank() == culprit:
            grad.to_local()[0, 0] = float("inf")
        before = [full(param).clone() for param in wrapped.parameters()]
        scaler.step(sgd)
        scaler.update()
        assert scaler.get_scale() == 4.0, f"rank {rank()}: {culprit}"
        for param, old in zip(wrapped.parameters(), before):
            assert torch.equal(full(param), old)


@case(2)
def torch_misses_an_overflow_behind_a_replica() -> None:
    """The reason for a rule of our own: when this fails, torch's can take its place."""
    mesh = init_device_mesh("cpu", (world(),))
    replica = distribute_tensor(torch.ones(2), mesh, [Replicate()])
    shard = DTensor.from_local(torch.full((2,), float("inf") if rank() else 1.0), mesh, run_check=False)
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([replica, shard], found, torch.ones(()))
    assert found == float(rank() == 1)


@case(2)
def the_functional_core_on_fsdp2s_gradients_equals_one_process() -> None:
    config = funcamp.ScalerConfig(**SCALER)
    adamw = funcamp.stateless(torch.optim.AdamW, lr=1e-2)

    def train_core(wrapped: nn.Module, split: Callable[[Any], Any]) -> tuple[funcamp.ScalerState, list[Tensor]]:
        names = [name for name, _ in wrapped.named_parameters()]
        params = {name: param.detach() for name, param in wrapped.named_parameters()}
        scaler, opt_state = funcamp.init(config), adamw.init(params)
        for number in range(STEPS):
            x, y = split(batch(number))
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.cross_entropy(wrapped(x).float(), y)
            funcamp.scale(scaler, loss).backward()
            held = dict(wrapped.named_parameters())
            grads, scaler = funcamp.unscale_and_check(scaler, {name: held[name].grad for name in names})
            grads, _ = funcamp.clip_grad_norm(grads, 1.0)
            params = {name: held[name].detach() for name in names}
            new = adamw.update(params, grads, opt_state)
            params, opt_state = funcamp.skip_step(scaler, new=new, old=(params, opt_state))
            scaler = funcamp.update(scaler, config)
            for name in names:
                held[name].detach().copy_(params[name])
                held[name].grad = None
        return scaler, [full(param) for param in wrapped.parameters()]

    expected, expected_params = train_core(model(), lambda whole: whole)
    state, params = train_core(sharded(init_device_mesh("cpu", (world(),))), mine)
    assert state == expected
    assert difference(params, expected_params) < 0.02


@case(2)
def a_module_that_torch_distributes_is_no_loss() -> None:
    for wrapped in (nn.parallel.DistributedDataParallel(model()), sharded(init_device_mesh("cpu", (world(),)))):
        with pytest.raises(TypeError, match="model must be the module itself"):
            funcamp.module_loss(wrapped, nn.functional.cross_entropy)


@case(2)
def an_overflow_on_one_rank_alone_skips_on_all() -> None:
    for wrapped in (nn.parallel.DistributedDataParallel(model()), sharded(init_device_mesh("cpu", (world(),)))):
        scaler = funcamp.GradScaler("cpu", init_scale=8.0, backoff_factor=0.25)
        seen = train(wrapped, scaler, mine, poison=lambda step: step == 3 and rank() == 1)
        assert [skipped for _, skipped in seen] == [step == 3 for step in range(STEPS)]
        assert scaler.get_scale() == 2.0


@case(2, 4)
def upstreams_own_case_of_fsdp2() -> None:
    """pytorch/pytorch, test_fully_shard_grad_scaler.py: its asserts, on one mesh and, of four ranks, on two."""
    meshes = [init_device_mesh("cpu", (world(),))]
    if world() == 4:
        meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    modes: tuple[Any, ...] = (None, "host", "select")
    for mesh, has_inf, skip in itertools.product(meshes, (True, False), modes):
        wrapped = model()
        if mesh.ndim == 2:
            parallelize_module(wrapped, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for layer in wrapped:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh["dp"] if mesh.ndim == 2 else mesh)
        adam = torch.optim.Adam(wrapped.parameters(), lr=1e-2)
        scaler = funcamp.GradScaler("cpu", init_scale=2.0, skip=skip)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
            scaler.scale(wrapped(batch(0)[0]).sum()).backward()
        grad: Any = next(wrapped.parameters()).grad
        if has_inf and rank() == 1:
            grad.to_local()[0, 0] = float("inf")
        before = grad.to_local().clone()
        scaler.unscale_(adam)
        noted = scaler._per_optimizer_states[id(adam)]
        assert [flag.item() for flag in noted["found_inf_per_device"].values()] == [float(has_inf)]
        assert noted["stage"].name == "UNSCALED"
        assert torch.equal(grad.to_local(), before * 0.5)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "GradScaler.step: a skipped step cannot be undone")
            scaler.step(adam)
        assert (not adam.state) == has_inf
        scaler.update()
        assert scaler.get_scale() == (1.0 if has_inf else 2.0)
