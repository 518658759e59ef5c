"""Loops that torch distributes (DDP, FSDP2, tensor parallelism) with funcamp in the place of torch's scaler.

They are compared with DDP's loop and torch's scaler, over overflows of float16 itself and overflows on one rank.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import funcamp
from tests.distributed.ranks.tools import assert_equal_on_all_ranks, full, meshes, mine, rank, world
from tests.support.helpers import assert_close, assert_same, clone

#: Growth and backoff by 128, for the reason that tests/distributed/ranks/step.py gives.
NUMBERS: dict[str, Any] = {"init_scale": 2.0**20, "growth_factor": 128.0, "backoff_factor": 1 / 128}
NUMBERS["growth_interval"] = 6
STEPS = 30
#: The rank that overflows, by step: alone, in a row, in the first step and in the last. In odd steps the overflow is in
#: its shard of a gradient, behind the sums over ranks.
CULPRITS = {0: 1, 9: 1, 10: 0, 17: 0, STEPS - 1: 1}


class Ended(NamedTuple):
    """A run: each step's scale and whether it was skipped, the parameters and their average."""

    rows: list[tuple[float, bool]]
    params: list[Tensor]
    average: list[Tensor]


class Layer(nn.Linear):
    """A layer whose forward is not torch's own, which Dynamo would leave alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(8, 16), Layer(16, 16, bias=False), nn.Linear(16, 4))


def sharded(mesh: Any, module: nn.Sequential) -> nn.Sequential:
    """The model under fully_shard, its layers in groups of their own."""
    for layer in (module[0], module[1], module):
        fully_shard(layer, mesh=mesh)
    return module


def compiled(module: nn.Sequential) -> nn.Sequential:
    """The model with its layers compiled one by one, as torchtitan compiles blocks."""
    for layer in (module[0], module[1]):
        layer.compile(backend="eager", fullgraph=True)
    return module


def batch(number: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number))
    return x, x[:, :4].argmax(1)


def train(
    module: nn.Module,
    scaler: Any,
    optimizer: Callable[..., Any] = functools.partial(SGD, momentum=0.9),
    *,
    clip: bool = False,
) -> Ended:
    """Train in torch's loop on this rank's parts of the batches."""
    params = list(module.parameters())
    made, rows = optimizer(params, lr=0.05), []
    average = [param.detach().clone() for param in params]
    for number in range(STEPS):
        x, y = mine(batch(number))
        culprit, in_a_shard = CULPRITS.get(number) == rank(), number % 2
        with torch.autocast("cpu", torch.float16):
            logits = module(x * torch.inf if culprit and not in_a_shard else x)
        scaler.scale(nn.functional.cross_entropy(logits.float(), y)).backward()
        if number in CULPRITS and in_a_shard:
            grad: Any = params[0].grad
            part = grad.to_local() if isinstance(grad, DTensor) else grad
            if culprit or part is grad:
                part[-1, -1] = torch.inf
        scale = scaler.get_scale()
        if clip:
            scaler.unscale_(made)
            nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(made)
        scaler.update()
        made.zero_grad()
        rows.append((scale, scaler.get_scale() < scale))
        if not rows[-1][1]:
            average = funcamp.ema_update(average, [param.detach() for param in params], 0.99)
    return Ended(rows, full([param.detach() for param in params]), full(average))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's
def test_ddp_and_fsdp2_equal_torchs_ddp_with_torchs_scaler() -> None:
    for options in ({}, {"clip": True}, {"optimizer": functools.partial(AdamW, fused=True)}):
        expected = train(DistributedDataParallel(model()), torch.amp.GradScaler("cpu", **NUMBERS), **options)
        skipped = {number for number, (_, is_skipped) in enumerate(expected.rows) if is_skipped}
        assert CULPRITS.keys() < skipped, "float16 itself never overflowed"
        found = train(DistributedDataParallel(model()), funcamp.GradScaler("cpu", **NUMBERS), **options)
        assert_same(found, expected)
        for mesh in meshes():
            module = sharded(mesh, compiled(model()))
            found = train(module, funcamp.GradScaler("cpu", **NUMBERS), **options)
            assert found.rows == expected.rows
            assert_equal_on_all_ranks(found[1:])
            assert_close(found[1:], expected[1:], 0.01)


def test_an_overflow_in_one_ranks_part_of_tensor_parallel_layers_skips_on_all() -> None:
    """On four ranks under FSDP2, as torch's own test of it: pytorch/pytorch, test_fully_shard_grad_scaler.py."""
    *_, mesh = meshes()
    for culprit, skip in itertools.product((-1, *range(world())), (None, "host", "select")):
        wrapped, rows = model(), mesh["rows"] if mesh.ndim == 2 else None
        parallelize_module(wrapped, mesh["columns"] if rows else mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        wrapped = sharded(rows, wrapped) if rows else wrapped
        adam = torch.optim.Adam(wrapped.parameters(), lr=1e-2, foreach=False)
        scaler = funcamp.GradScaler("cpu", init_scale=2.0, skip=skip)  # type: ignore[arg-type]
        before = full(clone(list(wrapped.parameters())))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
            warnings.filterwarnings("ignore", "GradScaler.step: a skipped step cannot be undone")
            scaler.scale(wrapped(batch(0)[0]).sum()).backward()
            grad: Any = next(wrapped.parameters()).grad
            if rank() == culprit:
                grad.to_local()[0, 0] = torch.inf
            own = grad.to_local().clone()
            scaler.unscale_(adam)
            assert torch.equal(grad.to_local(), own * 0.5)
            scaler.step(adam)
        scaler.update()
        assert scaler.get_scale() == (2.0 if culprit < 0 else 1.0)
        changed = [not torch.equal(*pair) for pair in zip(full(list(wrapped.parameters())), before)]
        assert any(changed) == bool(adam.state) == (culprit < 0)
