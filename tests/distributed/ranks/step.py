"""The data-parallel step against one process that sees every batch whole."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import funcamp
from funcamp import distributed
from tests.distributed.ranks import case
from tests.distributed.ranks.tools import assert_equal_on_all_ranks, called, counted, mine, rank, world
from tests.support.helpers import assert_same, difference
from tests.support.masked import masked, tokens
from tests.support.models import Task, cnn, mlp, tied

#: A scale far too high for float16 again and again, and never nearly too high: there the order of a sum decides.
HIGH = funcamp.ScalerConfig(init_scale=2.0**30, growth_factor=128.0, backoff_factor=1 / 128, growth_interval=3)
#: The same for the tied model, whose gradients are larger.
HIGH_IF_TIED = dataclasses.replace(HIGH, init_scale=2.0**27)


def made(task: Task, config: funcamp.ScalerConfig = HIGH, **options: Any) -> funcamp.TrainStep:
    adamw = funcamp.stateless(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    options = {"policy": "float16", "max_norm": 1.0, **options}
    return funcamp.make_train_step(funcamp.module_loss(task.model, task.criterion), adamw, config, **options)


def trained(step: Any, run: Any, batch: Callable[[int], Any], steps: int, flat: bool = True) -> tuple[Any, list[Any]]:
    """The last state, and of every step the loss, the norm, the scale and the flag."""
    state, seen = step.init(flat=flat), []
    for number in range(steps):
        state, metrics = run(state, batch(number))
        seen.append((metrics.loss.clone(), metrics.grad_norm.clone(), metrics.scale.item(), metrics.found_inf.item()))
    return state, seen


def compare(
    task: Task, steps: int, compiled: Callable[[Any], Any] = lambda step: step, flat: bool = True, **options: Any
) -> Any:
    """Train on all ranks and alone, and compare; the last state of the ranks."""
    parallel = distributed.DataParallel(**options.pop("parallel", {}))
    step, alone = made(task, parallel=parallel, **options), made(task, **options)
    state, seen = trained(step, compiled(step), lambda number: mine(task.batch(number)), steps, flat)
    expected, expected_seen = trained(alone, alone, task.batch, steps, flat)
    assert [row[2:] for row in seen] == [row[2:] for row in expected_seen], (seen, expected_seen)
    assert {row[3] for row in seen} == {0.0, 1.0}, "no step was skipped, or every one"
    for (loss, norm, _, found), (other, other_norm, *_) in zip(seen, expected_seen):
        torch.testing.assert_close(loss, other, rtol=2e-3, atol=2e-3)
        if not found:
            torch.testing.assert_close(norm, other_norm, rtol=2e-2, atol=1e-4)
    assert_equal_on_all_ranks(seen[-1][:2])
    full = distributed.gather_state(state)
    assert_equal_on_all_ranks(full)
    assert difference(tree(full.params), tree(expected.params)) < 0.02
    assert_same((full.step, full.skipped, full.scaler), (expected.step, expected.skipped, expected.scaler))
    return state


def tree(params: Any) -> Any:
    return params.tree()


@case(2, 4)
def equals_one_process() -> None:
    compare(mlp(), 24)
    compare(tied(), 24, config=HIGH_IF_TIED)


@case(2)
def equals_one_process_with_a_tensor_a_parameter() -> None:
    compare(mlp(), 24, flat=False)


@case(2)
def what_is_observed_is_that_of_one_process() -> None:
    task = mlp()
    observe = {
        "found_inf_by_leaf": funcamp.found_inf_by_leaf,
        "norm": lambda grads: {name: grad.norm() for name, grad in grads.items()},
    }
    low = funcamp.ScalerConfig(init_scale=8.0)
    for flat in (True, False):
        step = made(task, low, policy=None, parallel=distributed.DataParallel(), observe=observe)
        alone = made(task, low, policy=None, observe=observe)
        _, metrics = step(step.init(flat=flat), mine(task.batch(0)))
        _, expected = alone(alone.init(flat=flat), task.batch(0))
        assert_equal_on_all_ranks(metrics.observed)
        assert difference(metrics.observed["norm"], expected.observed["norm"]) < 1e-5
        x, y = mine(task.batch(0))
        _, metrics = step(step.init(flat=flat), (x / rank(), y))
        assert_equal_on_all_ranks(metrics.observed["found_inf_by_leaf"])
        assert metrics.observed["found_inf_by_leaf"].all()  # rank 0 alone divided by zero


@case(2)
def a_function_of_the_flag_tells_all_ranks() -> None:
    """Every rank has gradients of its own; where one overflows, all skip."""
    sgd = funcamp.stateless(torch.optim.SGD, lr=0.1)
    step = funcamp.make_train_step(lambda p, x: (p["w"] * x).sum(), sgd, parallel=distributed.max_over())
    state = step.init({"w": torch.ones(2)})
    for run in (step, funcamp.jit(step, backend="eager", donate=False)):
        for value, skips in ((1.0, 0), (float("inf") if rank() else 1.0, 1)):
            after, metrics = run(state, torch.tensor([1.0, value]))
            assert metrics.found_inf == skips
            assert torch.equal(after.params["w"], state.params["w"]) == bool(skips)


@case(2, 4)
def equals_one_process_cut_over_ranks() -> None:
    state = compare(mlp(), 24, parallel={"shard": True}, ema_decay=0.9)
    compare(tied(), 24, config=HIGH_IF_TIED, parallel={"shard": True})
    for leaf in torch.utils._pytree.tree_leaves((state.params, state.opt_state, state.ema)):
        if leaf.dim():
            assert leaf.to_local().numel() == leaf.to_local().untyped_storage().nbytes() // 4 == leaf.numel() // world()


@case(2)
def equals_one_process_with_accumulation() -> None:
    task = mlp()

    def window(number: int) -> Any:
        return tuple(leaf.unflatten(0, (2, -1)) for leaf in task.batch(number))

    def part(number: int) -> Any:
        first, second = (mine(tuple(leaf[piece] for leaf in window(number))) for piece in range(2))
        return tuple(torch.stack(pair) for pair in zip(first, second))

    for shard in (False, True):
        parallel = distributed.DataParallel(shard=shard)
        step, alone = made(task, parallel=parallel, accumulate=2), made(task, accumulate=2)
        state, seen = trained(step, step, part, 20)
        expected, expected_seen = trained(alone, alone, window, 20)
        assert [row[2:] for row in seen] == [row[2:] for row in expected_seen]
        assert difference(distributed.gather_state(state).params, expected.params) < 0.02


def expected_collectives(state: Any, shard: bool) -> dict[str, int]:
    """The collectives of a step: for the gradients with the loss; sharded, for each group, the loss, norm and flag."""
    if not shard:
        return {"all_reduce": 1}
    groups = len(state.params.groups)
    return {"reduce_scatter_tensor": groups, "all_gather_into_tensor": groups, "all_reduce": 3}


@case(2)
def compiled_equals_one_process() -> None:
    for shard in (False, True):
        found: list[Counter[str]] = []

        def compiled(step: Any, found: list[Counter[str]] = found) -> Any:
            run, calls = counted(step)
            found.append(calls)
            return run

        state = compare(mlp(), 16, compiled, parallel={"shard": shard})
        assert found == [expected_collectives(state, shard)]


def plain() -> Task:
    """What generated code computes is of no account beside what is sent: two layers are less to compile."""
    return Task(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), mlp().criterion, mlp().batch)


@case(2)
def jit_equals_one_process() -> None:
    for shard, backend in ((False, "eager"), (True, "inductor")):
        compare(plain(), 16, functools.partial(funcamp.jit, backend=backend), parallel={"shard": shard})


@case(2, 4)
def an_overflow_on_one_rank_alone_skips_on_all() -> None:
    task = mlp()
    low = funcamp.ScalerConfig(init_scale=8.0)
    for shard in (False, True):
        step = made(task, low, parallel=distributed.DataParallel(shard=shard))
        before = step.init()
        x, y = mine(task.batch(0))
        for culprit in range(world()):
            poisoned = torch.full_like(x, float("inf")) if rank() == culprit else x
            after, metrics = step(before, (poisoned, y))
            assert metrics.found_inf == 1.0
            assert_same(after.params, before.params)
            assert_same(after.opt_state, before.opt_state)
            assert after.scaler.scale == 4.0
        assert step(before, (x, y))[1].found_inf == 0.0


@case(2)
def collectives_are_one_a_dtype() -> None:
    task = mlp()
    batch = mine(task.batch(0))
    window = tuple(torch.stack([leaf] * 3) for leaf in batch)
    step = made(task, parallel=distributed.DataParallel())
    assert len(step.init().params.groups) > 2
    assert called(step, step.init(), batch) == expected_collectives(step.init(), False)
    step = made(task, parallel=distributed.DataParallel(), accumulate=3)
    assert called(step, step.init(), window) == {"all_reduce": 1}  # a window sums in float32
    step = made(task, parallel=distributed.DataParallel(), policy=None)
    assert called(step, step.init(flat=False), batch) == {"all_reduce": 1}
    step = made(task, parallel=distributed.DataParallel(shard=True))
    assert called(step, step.init(), batch) == expected_collectives(step.init(), True)


@case(2)
def buckets_are_summed_beside_the_backward_pass() -> None:
    task = mlp()
    for shard in (False, True):
        compare(task, 8, parallel={"shard": shard, "buckets": 3})
    torch.manual_seed(0)
    large = nn.Sequential(*[nn.Linear(768, 768) for _ in range(3)])  # above what is summed together
    wide = Task(large, nn.functional.mse_loss, lambda _: (torch.randn(4, 768), torch.randn(4, 768)))
    step = made(wide, policy="bfloat16", parallel=distributed.DataParallel(buckets=3))
    state, batch = step.init(), wide.batch(0)
    assert len(state.params.groups) > len(made(wide, parallel=distributed.DataParallel()).init().params.groups)
    _, (program,) = run_and_get_code(lambda: funcamp.jit(step)(state, batch))
    calls = re.findall(r"(?:cpu|c10d_functional)_(mm_out|all_reduce_|wait_tensor)\(", program)
    last_product = len(calls) - 1 - calls[::-1].index("mm_out")
    assert calls.index("all_reduce_") < last_product < calls.index("wait_tensor"), calls
    assert calls[:last_product].count("all_reduce_") == 2, calls


@case(2, 4)
def uneven_batches_count_by_their_weight() -> None:
    task, sizes = mlp(), [5, 0, 8, 3][: world()]
    whole = task.batch(0)
    total = sum(sizes)
    ends = [sum(sizes[: number + 1]) for number in range(world())]
    expected_batch = tuple(leaf[:total] for leaf in whole)
    my_batch = tuple(leaf[ends[rank()] - sizes[rank()] : ends[rank()]] for leaf in whole)
    low = funcamp.ScalerConfig(init_scale=8.0)
    alone = made(task, low)
    expected, expected_metrics = alone(alone.init(), expected_batch)
    weights: list[Callable[[Any], Any]] = [
        lambda batch: len(batch[0]),
        lambda batch: torch.ones_like(batch[1], dtype=torch.int64).sum(),
    ]
    for weight in weights:
        for shard in (False, True):
            step = made(task, low, parallel=distributed.DataParallel(shard=shard), weight=weight)
            state, metrics = step(step.init(), my_batch)
            torch.testing.assert_close(metrics.loss, expected_metrics.loss, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(metrics.grad_norm, expected_metrics.grad_norm, rtol=1e-2, atol=1e-4)
            assert metrics.found_inf == 0.0
            assert difference(distributed.gather_state(state).params, expected.params) < 0.02
            assert_equal_on_all_ranks(distributed.gather_state(state))


@case(2)
def micro_batches_count_by_their_weight_on_all_ranks() -> None:
    x = torch.randint(-8, 9, (2, 2, 8, 3), generator=torch.Generator().manual_seed(0)).float()
    counts = torch.tensor([[1, 8], [0, 7]])  # 16, so that no share is rounded
    mask = (torch.arange(8) < counts[..., None]).float()
    alone = funcamp.make_train_step(masked, SGD)
    expected, expected_metrics = alone(alone.init({"w": torch.ones(3)}), (x.flatten(0, 2), mask.flatten()))
    for shard in (False, True):
        parallel = distributed.DataParallel(shard=shard)
        step = funcamp.make_train_step(masked, SGD, accumulate=2, parallel=parallel, weight=tokens)
        state, metrics = step(step.init({"w": torch.ones(3)}), (x[rank()], mask[rank()]))
        assert_same(distributed.gather_state(state).params["w"], expected.params["w"])
        assert_same(metrics.loss, expected_metrics.loss)


@case(2)
def weights_must_be_numbers_or_scalars() -> None:
    for weight, message in (
        (lambda batch: batch[1], r"a tensor of shape \(\)"),
        (lambda _: -1, "0 or a positive number"),
    ):
        step = made(mlp(), parallel=distributed.DataParallel(), weight=weight)
        with pytest.raises(ValueError, match=f"weight must return {message}"):
            step(step.init(), mine(mlp().batch(0)))


SGD = funcamp.stateless(torch.optim.SGD, lr=0.1)


def linear(**options: Any) -> funcamp.TrainStep:
    """A step of `masked`, whose ranks count by their unmasked rows."""
    return funcamp.make_train_step(masked, SGD, parallel=distributed.DataParallel(**options), weight=tokens)


@case(2)
def a_rank_whose_examples_are_all_masked_changes_nothing() -> None:
    x = torch.arange(12.0).view(4, 3) + rank()
    for dtype, shard in ((torch.float32, False), (torch.float32, True), (torch.float64, False)):
        step = linear(shard=shard)
        mask = torch.ones(4, dtype=dtype) if rank() == 0 else torch.zeros(4, dtype=dtype)
        _, metrics = step(step.init({"w": torch.ones(3, dtype=dtype)}), (x.to(dtype), mask))
        first = torch.arange(12.0, dtype=dtype).view(4, 3)
        assert metrics.found_inf == 0.0
        assert_same(metrics.loss, first.sum(1).mean())
        torch.testing.assert_close(metrics.grad_norm, first.mean(0).norm().float())


@case(2)
def weights_are_exact_in_float64() -> None:
    step = linear()
    mask = torch.tensor([1.0, float(rank())], dtype=torch.float64)
    rows = torch.full((2, 1), 1.0 + rank(), dtype=torch.float64)
    _, metrics = step(step.init({"w": torch.ones(1, dtype=torch.float64)}), (rows, mask))
    torch.testing.assert_close(metrics.loss, torch.tensor(5 / 3, dtype=torch.float64), rtol=1e-15, atol=0.0)


@case(2)
def a_weight_that_is_no_weight_skips_the_step() -> None:
    for low in (-0.5, float("nan")):
        step = linear()
        mask = torch.full((4,), 1.0 if rank() == 0 else low)
        _, metrics = step(step.init({"w": torch.ones(3)}), (torch.ones(4, 3), mask))
        assert metrics.found_inf == 1.0
        assert metrics.loss.isnan()


@case(2)
def buffers_that_were_infinite_or_large_come_to_their_mean() -> None:
    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Any:
        return (params["w"] * x).sum(), {name: torch.minimum(value, x.min()) for name, value in buffers.items()}

    loss = funcamp.loss(loss_fn, has_buffers=True)
    step = funcamp.make_train_step(loss, funcamp.stateless(torch.optim.SGD), parallel=distributed.DataParallel())
    buffers = {"infinite": torch.tensor(float("inf")), "large": torch.tensor(1e9), "kept": torch.tensor(-1 / 3)}
    state, _ = step(step.init({"w": torch.ones(3)}, buffers), torch.full((3,), 1.0 + 2 * rank()))
    assert_same(
        state.buffers, {"infinite": torch.tensor(2.0), "large": torch.tensor(2.0), "kept": torch.tensor(-1 / 3)}
    )


@case(2)
def ranks_that_begin_with_other_parameters_are_told() -> None:
    step = linear()
    for params in ({"w": torch.ones(3 + rank())}, {"w": torch.ones(3)} if rank() else {"v": torch.ones(3)}):
        with pytest.raises(ValueError, match="must have the same names, shapes and dtypes on all ranks; on rank 0"):
            step.init(params)


@case(2)
def ranks_with_other_constants_are_told() -> None:
    def build(
        config: Any = funcamp.ScalerConfig(), lr: Any = 0.1, own: Any = None, keep: bool = False, **options: Any
    ) -> Any:
        parallel = distributed.DataParallel(**(own or {}))
        optimizer = funcamp.by_group(
            {label: funcamp.stateless(torch.optim.SGD, lr=lr) for label in ("matrix", "vector")}
        )
        loss = funcamp.loss(lambda p, b, x: ((p["w"] * x).sum(), b), has_buffers=True, keep_buffers=keep)
        return funcamp.make_train_step(loss, optimizer, config, parallel=parallel, **options)

    other = rank() == 1
    for step, named in (
        (build(funcamp.ScalerConfig(init_scale=2.0 ** (8 + rank()))), "on rank 0 init_scale of ScalerConfig is 256.0"),
        (build(funcamp.ScalerConfig(growth_interval=10 + rank())), "on rank 1 growth_interval of ScalerConfig is 11"),
        (build(lr=0.1 + rank()), "lr=1.1"),
        (build(lr=torch.tensor(0.5 + rank())), r"lr=tensor\(1.5000\)"),
        (build(max_norm=1.0 if other else None), "max_norm is 1.0"),
        (build(ema_decay=0.5 if other else None), "ema_decay is 0.5"),
        (build(policy="bfloat16" if other else None), "policy is .*bfloat16"),
        (build(own={"buckets": 1 + rank()}), "buckets of DataParallel is 2"),
        (build(keep=other), "keep_buffers is True"),
    ):
        with pytest.raises(
            ValueError, match="the optimizer and every constant must be the same on all ranks"
        ) as caught:
            step.init({"w": torch.ones(3)})
        assert re.search(named, str(caught.value)), str(caught.value)
    with pytest.raises(ValueError, match="flat is False"):
        build().init({"w": torch.ones(3)}, flat=not other)
    # what has another place in every process is the same
    build(lr=lambda applied: 0.1 / (1 + applied)).init({"w": torch.ones(3)})
    build(lr=torch.tensor(0.5), max_norm=torch.tensor(1.0)).init({"w": torch.ones(3)})


@case(2)
def a_state_of_another_layout_is_refused() -> None:
    whole, cut = (
        made(mlp(), parallel=distributed.DataParallel()),
        made(mlp(), parallel=distributed.DataParallel(shard=True)),
    )
    batch = mine(mlp().batch(0))
    with pytest.raises(ValueError, match="state must be sharded over this step's ranks"):
        cut(whole.init(), batch)
    with pytest.raises(ValueError, match="state must not be sharded"):
        whole(cut.init(), batch)


@case(2)
def buffers_are_averaged_and_equal_on_all_ranks() -> None:
    task = cnn()
    task.model.register_buffer("mask", torch.tensor([0.0, -float("inf"), 1 / 3]))
    low = funcamp.ScalerConfig(init_scale=8.0)
    step = made(task, low, parallel=distributed.DataParallel())
    local = made(task, low, parallel=distributed.DataParallel(mean_buffers=False))
    state, own = step.init(), local.init()
    batch = mine(task.batch(0))
    after, _ = step(state, batch)
    kept, _ = local(own, batch)
    assert_equal_on_all_ranks(after.buffers)
    assert_same(after.buffers["mask"], task.model.mask)
    for name, value in kept.buffers.items():
        if value.is_floating_point() and name != "mask":
            total = value.clone()
            torch.distributed.all_reduce(total)
            torch.testing.assert_close(after.buffers[name], total / world())
    assert not torch.equal(kept.buffers["1.running_mean"], after.buffers["1.running_mean"])


@case(2)
def init_begins_with_the_first_ranks_values() -> None:
    task = mlp()
    with torch.no_grad():
        for param in task.model.parameters():
            param.add_(rank())
    for shard in (False, True):
        state = made(task, parallel=distributed.DataParallel(shard=shard)).init()
        full = distributed.gather_state(state)
        assert_equal_on_all_ranks(full)
        assert_same(full.params, made(mlp()).init().params)


@case(2)
def a_state_in_the_modules_place_begins_with_the_first_ranks_values() -> None:
    task, expected = cnn(), cnn()
    with torch.no_grad():
        for value in (*task.model.parameters(), *task.model.buffers()):
            value.add_(rank())
    step = made(task, parallel=distributed.DataParallel())
    state = step.init(consume=True)
    assert_same(dict(task.model.state_dict()), dict(expected.model.state_dict()))
    after, _ = funcamp.jit(step, backend="eager")(state, mine(task.batch(0)))
    assert after is state
    assert_same(dict(task.model.state_dict()), step.loss_fn.state_dict(after.params, after.buffers))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"init: consume must be False with DataParallel\(.*shard=True\)"):
        made(task, parallel=distributed.DataParallel(shard=True)).init(consume=True)


@case(2)
def gradients_may_be_summed_in_another_precision() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for shard in (False, True):
            compare(mlp(), 12, parallel={"dtype": dtype, "shard": shard})


@case(2)
def what_cannot_be_cut_is_refused() -> None:
    task = mlp()
    loss_fn = funcamp.module_loss(task.model, task.criterion)
    parallel = distributed.DataParallel(shard=True)
    adamw = funcamp.stateless(torch.optim.AdamW)
    step = funcamp.make_train_step(loss_fn, adamw, parallel=parallel)
    with pytest.raises(ValueError, match=r"init: flat must be True with DataParallel\(.*shard=True\); got False"):
        step.init(flat=False)
    observe = {"found_inf_by_leaf": funcamp.found_inf_by_leaf}
    with pytest.raises(ValueError, match=r"observe must not be given with DataParallel\(.*shard=True\); got a dict"):
        funcamp.make_train_step(loss_fn, adamw, parallel=parallel, observe=observe)
    with pytest.raises(TypeError, match=r"parallel must be a distributed\.DataParallel or a function .* got 'all'"):
        funcamp.make_train_step(loss_fn, adamw, parallel="all")  # type: ignore[arg-type]
    muon = funcamp.make_train_step(loss_fn, funcamp.stateless(torch.optim.Adafactor), parallel=parallel)
    with pytest.raises(TypeError, match="only an elementwise optimizer takes them"):
        muon.init()
    state = funcamp.make_train_step(loss_fn, adamw, parallel=parallel).init()
    with pytest.raises(TypeError, match=r"distributed\.gather_state makes them complete"):
        state.params.tree()


@case(2)
def groups_of_hyperparameters_are_cut_too() -> None:
    task = mlp()
    loss_fn = funcamp.module_loss(task.model, task.criterion)
    sgd = {
        label: funcamp.stateless(torch.optim.SGD, lr=lr, momentum=0.9)
        for label, lr in (("matrix", 0.1), ("vector", 0.0))
    }
    step = funcamp.make_train_step(loss_fn, funcamp.by_group(sgd), parallel=distributed.DataParallel(shard=True))
    alone = funcamp.make_train_step(loss_fn, funcamp.by_group(sgd))
    state, expected = step.init(), alone.init()
    for number in range(3):
        state, _ = step(state, mine(task.batch(number)))
        expected, _ = alone(expected, task.batch(number))
    assert difference(distributed.gather_state(state).params, expected.params) < 1e-5
    assert len(step.state_dict(state)) == len(alone.state_dict(expected))
