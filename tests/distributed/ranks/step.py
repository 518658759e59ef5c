"""The data-parallel step, sharded and not, against one process that sees every batch in full."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import funcamp
from funcamp import _upstream, distributed
from funcamp.distributed import DataParallel
from tests.distributed.ranks.tools import assert_equal_on_all_ranks, mine, rank, square, world
from tests.float8 import models as float8
from tests.support.helpers import assert_same, difference
from tests.support.masked import masked, tokens
from tests.support.models import Task, cnn, mlp, tied
from tests.support.steps import SGD, build, compiled, eager, traced

#: A scale far too high for float16 again and again, and never nearly too high: there the order of a sum decides.
HIGH = funcamp.ScalerConfig(init_scale=2.0**30, growth_factor=128.0, backoff_factor=1 / 128, growth_interval=3)
#: The same for the tied model, whose gradients are larger.
HIGH_IF_TIED = dataclasses.replace(HIGH, init_scale=2.0**27)
LOW = funcamp.ScalerConfig(init_scale=8.0)
ADAMW = funcamp.stateless(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
BY_LABEL = funcamp.by_group({"matrix": ADAMW, "vector": funcamp.stateless(torch.optim.AdamW, lr=1e-3)})


def made(task: Task, config: funcamp.ScalerConfig = HIGH, optimizer: Any = ADAMW, **options: Any) -> Any:
    return build(task, optimizer, config=config, **{"policy": "float16", "max_norm": 1.0, **options})


def tree(state: Any) -> Any:
    return distributed.gather_state(state).params.tree()


def compare(
    task: Task,
    parallel: DataParallel,
    run: Callable[[Any], Any] = eager,
    *,
    flat: bool = True,
    accumulate: int = 1,
    **others: Any,
) -> None:
    """Train on all ranks and on one: the same scales, flags and counts; losses, norms and parameters near."""

    def window(number: int) -> Any:
        batch = task.batch(number)
        return batch if accumulate == 1 else tuple(leaf.unflatten(0, (accumulate, -1)) for leaf in batch)

    step, alone = (made(task, accumulate=accumulate, **others, parallel=over) for over in (parallel, None))
    call, flags = run(step), set()
    state, expected = step.init(flat=flat), alone.init(flat=flat)
    for number in range(12):
        state, metrics = call(state, mine(window(number), int(accumulate > 1)))
        expected, wanted = alone(expected, window(number))
        flags.add(metrics.found_inf.item())
        counts = ("found_inf", "scale", "applied", "skipped")
        assert_same([getattr(metrics, name) for name in counts], [getattr(wanted, name) for name in counts])
        assert_equal_on_all_ranks((metrics.loss, metrics.grad_norm, metrics.observed))
        torch.testing.assert_close(metrics.loss, wanted.loss, rtol=2e-3, atol=2e-3)
        if not metrics.found_inf:
            found = (metrics.grad_norm, metrics.observed)
            torch.testing.assert_close(found, (wanted.grad_norm, wanted.observed), rtol=2e-2, atol=1e-4)
    assert flags == {0.0, 1.0}, "no step was skipped, or every one"
    complete = distributed.gather_state(state)
    assert_equal_on_all_ranks(complete)
    assert_same((complete.step, complete.skipped, complete.scaler), (expected.step, expected.skipped, expected.scaler))
    assert difference(complete.params.tree(), expected.params.tree()) < 0.02


def parallels() -> list[DataParallel]:
    """Not sharded, sharded, and of four ranks sharded in two rows."""
    rows = [DataParallel(square(), shard=True)] if world() == 4 else []
    return [DataParallel(), DataParallel(shard=True), *rows]


def test_equals_one_process() -> None:
    for parallel in parallels():
        compare(mlp(), parallel)
        compare(tied(), parallel, config=HIGH_IF_TIED)
        compare(mlp(), parallel, accumulate=2)
        compare(mlp(), parallel, traced, ema_decay=0.9)
    compare(mlp(), DataParallel(), flat=False, observe={"norm": lambda grads: grads["0.weight"].norm()})
    for shard in (False, True):
        compare(mlp(), DataParallel(shard=shard, buckets=3, dtype=torch.bfloat16), optimizer=BY_LABEL)


@pytest.mark.ranks(n=2)
def test_compiled_equals_one_process() -> None:
    small = Task(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), *mlp()[1:])  # less to compile
    compare(small, DataParallel(), compiled)
    sharded = DataParallel(shard=True)
    if _upstream.VERSION >= (2, 13):  # Dynamo of 2.11 does not trace a step on DTensors
        compare(small, sharded, compiled)
    compare(small, sharded, funcamp.jit)


@pytest.mark.ranks(n=4)
def test_groups_that_cannot_be_cut_evenly_and_complex_ones_equal_one_process() -> None:
    three = dist.new_group([0, 1, 2])
    if rank() == 3:
        return
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    params = {"w": torch.tensor([1 + 2j, 3j, 0.5]), "v": torch.ones(70)}

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        loss: Tensor = (p["w"] * x).abs().square().mean() + p["v"].square().sum()
        return loss

    for shard in (False, True):
        alone = funcamp.make_train_step(loss_fn, ADAMW)
        step = funcamp.make_train_step(loss_fn, ADAMW, parallel=DataParallel(three, shard=shard))
        state, expected = step.init(params), alone.init(params)
        for _ in range(3):
            state, metrics = step(state, x.chunk(3)[rank()])
            expected, wanted = alone(expected, x)
            torch.testing.assert_close(metrics.grad_norm, wanted.grad_norm)
        torch.testing.assert_close(tree(state), expected.params.tree())


def test_an_overflow_on_one_rank_skips_on_all() -> None:
    in_float8 = Task(float8.converted(), nn.functional.cross_entropy, lambda number: float8.batch(number, 8))
    for task, shard in itertools.product((mlp(), in_float8), (False, True)):
        step = made(task, LOW, parallel=DataParallel(shard=shard))
        before, (x, y) = step.init(), mine(task.batch(0))
        for culprit in range(world()):
            after, metrics = step(before, (x * torch.inf if rank() == culprit else x, y))
            assert (metrics.found_inf, after.scaler.scale) == (1.0, 4.0)
            assert_same((after.params, after.opt_state), (before.params, before.opt_state))
        assert step(before, (x, y))[1].found_inf == 0.0


def test_batches_and_micro_batches_count_by_their_weight_on_all_ranks_bit_for_bit() -> None:
    """In float64, and with powers of two, so that nothing is rounded. The first batch of rank 1 is empty."""
    counts = torch.tensor([[4, 8], [0, 4], [2, 8], [2, 4]])[: world()]
    drawn = torch.randint(-8, 9, (*counts.shape, 8, 3), generator=torch.Generator().manual_seed(0))
    x = drawn.double() * (1 + 2.0**-40)
    mask = (torch.arange(8) < counts[..., None]).double()
    params = {"w": torch.ones(3, dtype=torch.float64)}
    alone = funcamp.make_train_step(masked, SGD)
    for shard, accumulate in itertools.product((False, True), (1, 2)):
        batch = x[:, :accumulate], mask[:, :accumulate]
        expected, wanted = alone(alone.init(params), tuple(leaf.flatten(0, 2) for leaf in batch))
        parallel = DataParallel(shard=shard)
        step = funcamp.make_train_step(masked, SGD, accumulate=accumulate, parallel=parallel, weight=tokens)
        own = tuple(leaf[rank()] if accumulate > 1 else leaf[rank(), 0] for leaf in batch)
        state, metrics = step(step.init(params), own)
        assert_same((tree(state), metrics.loss), (tree(expected), wanted.loss))


@pytest.mark.ranks(n=2)
def test_buffers_come_to_their_mean_unless_nothing_wrote_them_or_each_rank_keeps_its_own() -> None:
    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Any:
        return (params["w"] * x).sum(), {name: torch.minimum(value, x.min()) for name, value in buffers.items()}

    own = 1.0 + 2 * rank()
    buffers = {"infinite": torch.tensor(torch.inf), "large": torch.tensor(1e9), "unwritten": torch.tensor(-1e-45)}
    for mean_buffers, value in ((True, 2.0), (False, own)):
        parallel, with_buffers = DataParallel(mean_buffers=mean_buffers), funcamp.loss(loss_fn, has_buffers=True)
        step = funcamp.make_train_step(with_buffers, SGD, parallel=parallel)
        state, _ = step(step.init({"w": torch.ones(3)}, buffers), torch.full((3,), own))
        written = torch.tensor(value)
        assert_same(state.buffers, {"infinite": written, "large": written, "unwritten": torch.tensor(-1e-45)})


def partly_frozen() -> Task:
    task = cnn()
    next(task.model.parameters()).requires_grad_(False)
    return task


def test_init_begins_with_the_first_ranks_values() -> None:
    first = partly_frozen()
    expected = made(first).init()
    for parallel in parallels():
        for consume in {False, not parallel.shard}:
            task = partly_frozen()
            with torch.no_grad():
                for value in (*task.model.parameters(), *task.model.buffers()):
                    value.add_(rank())
            state = made(task, parallel=parallel).init(consume=consume)
            assert_same((tree(state), state.buffers), (tree(expected), expected.buffers))
            assert_same(next(task.model.parameters()), next(first.model.parameters()))
            if consume:
                assert_same(dict(task.model.state_dict()), dict(cnn().model.state_dict()))


def test_ranks_that_differ_are_refused_on_all() -> None:
    def init(
        config: Any = LOW,
        lr: Any = 0.1,
        own: Any = None,
        params: Any = None,
        flat: bool = True,
        label: str = "slow",
        **more: Any,
    ) -> Any:
        optimizers = {"slow": funcamp.stateless(torch.optim.SGD, lr=lr), "fast": SGD}
        optimizer = funcamp.by_group(optimizers, group=lambda *_: label)
        step = funcamp.make_train_step(
            lambda p, x: (p["w"] * x).sum(), optimizer, config, parallel=DataParallel(**(own or {})), **more
        )
        return step.init(params or {"w": torch.ones(3)}, flat=flat)

    last = world() - 1
    other = rank() == last
    mesh = init_device_mesh("cpu", (2, world() // 2))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"config": funcamp.ScalerConfig(8.0 + other)}, "constant.*on rank 0 init_scale of ScalerConfig is 8.0"),
        ({"lr": 0.1 + other}, f"on rank {last} .*lr=1.1"),
        ({"lr": torch.tensor(0.5 + other)}, r"lr=tensor\(1.5000\)"),
        ({"policy": "bfloat16" if other else None}, "policy is .*bfloat16"),
        ({"weight": tokens if other else None}, "weight is 'given'"),
        ({"own": {"buckets": 1 + other, "group": mesh, "shard": True}}, f"on rank {last} buckets of DataParallel is 2"),
        ({"flat": not other}, "flat is False"),
        (
            {"params": {"w": torch.ones(3 + other)}},
            "must have the same names, shapes, dtypes and groups",
        ),
        ({"params": {"v" if other else "w": torch.ones(3)}}, "must have the same names"),
        ({"label": "fast" if other else "slow"}, f"on rank 0 w is .*'slow', on rank {last} w is .*'fast'"),
    ]
    for options, words in refused:
        with pytest.raises(ValueError, match=f"(?s)init: .*{words}"):
            init(**options)
    # what has another place in every process is the same
    init(lr=lambda applied: 0.1 / (1 + applied), max_norm=torch.tensor(1.0))
