"""Loops that torch distributes (DDP, FSDP2, tensor parallelism) with funcamp in the place of torch's scaler.

Each is compared with torch's own loop and scaler, over overflows of float16 itself and overflows on one rank.
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
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

import funcamp
from funcamp.distributed import DataParallel, gather_state
from tests.distributed.ranks.tools import assert_equal_on_all_ranks, full, meshes, mine, rank, shared_folder, world
from tests.support.helpers import assert_close, assert_same, clone

#: Growth and backoff by 128, for the reason that tests/distributed/ranks/step.py gives.
NUMBERS: dict[str, Any] = {"init_scale": 2.0**20, "growth_factor": 128.0, "backoff_factor": 1 / 128}
NUMBERS["growth_interval"] = 6
CONFIG = funcamp.ScalerConfig(**NUMBERS)
DECAY = 0.99
MOMENTUM: Any = {"momentum": 0.9}
LONG = 500


class Ended(NamedTuple):
    """A run: each step's scale and whether it was skipped, the last rate, the parameters and their average."""

    rows: list[tuple[float, bool]]
    rate: float
    params: list[Tensor]
    average: list[Tensor]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 4))


def rate(applied: Any) -> Any:
    """The schedule: a function of the applied steps, numbers or tensors."""
    return 0.05 * 0.998**applied


def culprits() -> dict[int, int]:
    """The rank that overflows, by step: some alone, some in a row, the first step and the last."""
    generator = torch.Generator().manual_seed(0)
    steps = [*torch.randperm(LONG, generator=generator)[:40].tolist(), 0, 7, 100, 101, 102, 103, LONG - 1]
    return dict(zip(steps, torch.randint(2, (len(steps),), generator=generator).tolist()))


CULPRITS = culprits()


def batch(number: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number))
    return x, x[:, :4].argmax(1)


def part_of(number: int, owner: int, *, spoiled: bool = True) -> tuple[Tensor, Tensor]:
    """A rank's part of a step's batch, which is infinite on one rank in some steps."""
    x, y = (leaf.chunk(world())[owner] for leaf in batch(number))
    return (x * torch.inf if spoiled and CULPRITS.get(number) == owner else x), y


def criterion(logits: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float(), y)


def train(
    module: nn.Module,
    scaler: Any,
    steps: int,
    owners: list[int],
    optimizer: Callable[..., Any] = functools.partial(SGD, **MOMENTUM),
    *,
    clip: bool = False,
    in_a_shard: bool = True,
) -> Ended:
    """Train in torch's loop on the parts of these ranks.

    in_a_shard: in odd steps one rank's overflow is in its shard of a gradient, behind the sums over ranks.
    """
    params = list(module.parameters())
    made = optimizer(params, lr=rate(0))
    schedule, rows = LambdaLR(made, lambda applied: rate(applied) / rate(0)), []
    average = [param.detach().clone() for param in params]
    for number in range(steps):
        late = in_a_shard and number % 2 and number in CULPRITS
        for owner in owners:
            x, y = part_of(number, owner, spoiled=not late)
            with torch.autocast("cpu", torch.float16):
                loss = criterion(module(x), y) / len(owners)
            scaler.scale(loss).backward()
        if late:
            grad: Any = params[0].grad
            part = grad.to_local() if isinstance(grad, DTensor) else grad
            if part is grad or rank() == CULPRITS[number]:
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
            schedule.step()
            average = funcamp.ema_update(average, [param.detach() for param in params], DECAY)
    detached = [param.detach() for param in params]
    return Ended(rows, float(schedule.get_last_lr()[0]), full(detached), full(average))


def assert_near(found: Ended, expected: Ended) -> None:
    assert found.rows == expected.rows
    natural = [skipped and number not in CULPRITS for number, (_, skipped) in enumerate(expected.rows)]
    assert any(natural), "float16 itself never overflowed"
    assert sum(natural) + len([number for number in CULPRITS if number < len(natural)]) < len(natural)
    torch.testing.assert_close(found.rate, expected.rate, rtol=1e-4, atol=0.0)
    assert_equal_on_all_ranks((found.params, found.average))
    assert_close((found.params, found.average), (expected.params, expected.average), 0.01)


def sharded(mesh: Any, module: nn.Module | None = None) -> nn.Module:
    """The model under fully_shard, its layers in groups of their own."""
    wrapped: Any = module or model()
    for layer in (wrapped[0], wrapped[2], wrapped):
        fully_shard(layer, mesh=mesh)
    return wrapped  # type: ignore[no-any-return]


def torch_ddp(steps: int, **options: Any) -> Ended:
    return train(DistributedDataParallel(model()), torch.amp.GradScaler("cpu", **NUMBERS), steps, [rank()], **options)


def test_ddp_and_fsdp2_equal_torchs_ddp_with_torchs_scaler() -> None:
    for options in ({}, {"clip": True}, {"optimizer": functools.partial(AdamW, fused=True)}):
        expected = torch_ddp(30, **options)
        for mesh in (None, *meshes()):
            module = DistributedDataParallel(model()) if mesh is None else sharded(mesh)
            found = train(module, funcamp.GradScaler("cpu", config=CONFIG), 30, [rank()], **options)
            assert_near(found, expected)
            if mesh is None:
                assert_same(found, expected)


@pytest.mark.ranks(n=2)
def test_overflows_on_one_rank_over_500_steps_under_fsdp2_are_those_of_torchs_loop() -> None:
    found = train(sharded(meshes()[0]), funcamp.GradScaler("cpu", config=CONFIG), LONG, [rank()])
    assert_near(found, torch_ddp(LONG))


@pytest.mark.ranks(n=2)
def test_overflows_on_one_rank_over_500_sharded_steps_are_those_of_torchs_loop() -> None:
    """One process that adds up the gradients of both parts: so they overflow where they do on two ranks."""
    scaler = torch.amp.GradScaler("cpu", **NUMBERS)
    expected = train(model(), scaler, LONG, [0, 1], in_a_shard=False)
    sgd = funcamp.stateless(SGD, lr=rate, **MOMENTUM)
    options: Any = {"policy": "float16", "ema_decay": DECAY, "parallel": DataParallel(shard=True)}
    step = funcamp.make_train_step(funcamp.module_loss(model(), criterion), sgd, CONFIG, **options)
    state, rows = step.init(), []
    for number in range(LONG):
        scale = state.scaler.scale.item()
        state, metrics = step(state, part_of(number, rank()))
        rows.append((scale, bool(metrics.found_inf)))
    whole: Any = gather_state(state)
    params, average = ([*tree.tree().values()] for tree in (whole.params, whole.ema))
    assert_near(Ended(rows, sgd.learning_rate(state.opt_state[0]).item(), params, average), expected)


def test_an_overflow_in_one_ranks_part_of_tensor_parallel_layers_skips_on_all() -> None:
    """On four ranks under FSDP2, as torch's own test of it: pytorch/pytorch, test_fully_shard_grad_scaler.py."""
    *_, mesh = meshes()
    for culprit, skip in itertools.product((-1, *range(world())), (None, "host", "select")):
        wrapped, rows = model(), mesh["rows"] if mesh.ndim == 2 else None
        parallelize_module(wrapped, mesh["columns"] if rows else mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        wrapped = sharded(rows, wrapped) if rows else wrapped  # type: ignore[assignment]
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


class Block(nn.Module):
    """A layer whose forward is not torch's own, which Dynamo would leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        return x + nn.functional.silu(self.linear(self.norm(x)))


class Titan:
    """A run in torchtitan's style: every block compiled and sharded, float16 without autocast, float32 sums."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        torch.manual_seed(0)
        precision = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
        (mesh,) = meshes()
        blocks = [Block(), Block()]
        self.model: Any = nn.Sequential(nn.Linear(8, 16), *blocks, nn.Linear(16, 4))
        for block in blocks:
            block.compile(backend="eager", fullgraph=True)
            fully_shard(block, mesh=mesh, mp_policy=precision)
        fully_shard(self.model, mesh=mesh, mp_policy=precision)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.scaler, self.taken = scaler, 0

    def train(self, last: int) -> list[Any]:
        """Accumulate two micro-batches a step; return what every step leaves."""
        seen = []
        for number in range(self.taken, last):
            for part in range(2):
                x, y = mine(batch(2 * number + part))
                self.model.set_requires_gradient_sync(part == 1)
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # Dynamo's
                    loss = criterion(self.model(x), y) / 2
                self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            params = [param.detach() for param in self.model.parameters()]
            seen.append((clone(full([norm.detach(), *params])), self.scaler.state_dict()))
        self.taken = last
        return seen

    def state_dict(self) -> dict[str, Any]:
        params, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": params, "optim": optimizer, "scaler": self.scaler.state_dict(), "taken": self.taken}

    def load_from(self, folder: Any) -> Titan:
        saved = self.state_dict()
        load(saved, checkpoint_id=folder)
        states = {"model_state_dict": saved["model"], "optim_state_dict": saved["optim"]}
        set_state_dict(self.model, self.optimizer, **states)
        self.scaler.load_state_dict(saved["scaler"])
        self.taken = saved["taken"]
        return self


@pytest.mark.ranks(n=2)
def test_torchtitans_style_equals_torchs_scaler_also_resumed_with_the_other_one() -> None:
    high = {**NUMBERS, "init_scale": 2.0**30, "growth_interval": 3}
    makers: tuple[Any, ...] = (torch.amp.GradScaler, funcamp.GradScaler)
    expected = Titan(makers[0]("cpu", **high)).train(12)
    scales = [scaler["scale"] for _, scaler in expected]
    assert {b < a for a, b in itertools.pairwise(scales) if a != b} == {True, False}, scales
    for first, second in (makers, makers[::-1]):
        run, folder = Titan(first("cpu", **high)), shared_folder()
        begun = run.train(6)
        save(run.state_dict(), checkpoint_id=folder)
        assert_same([*begun, *Titan(second("cpu")).load_from(folder).train(12)], expected)
