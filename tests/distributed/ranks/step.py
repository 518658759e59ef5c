"""The data-parallel step, sharded and not, against one process that sees every batch in full."""

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
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree

import funcamp
from funcamp import _upstream, distributed
from tests.distributed.ranks import case
from tests.distributed.ranks.tools import assert_equal_on_all_ranks, called, counted, mine, rank, world
from tests.support.helpers import assert_same, difference
from tests.support.masked import masked, tokens
from tests.support.models import Task, cnn, mlp, tied

#: A scale far too high for float16 again and again, and never nearly too high: there the order of a sum decides.
HIGH = funcamp.ScalerConfig(init_scale=2.0**30, growth_factor=128.0, backoff_factor=1 / 128, growth_interval=3)
#: The same for the tied model, whose gradients are larger.
HIGH_IF_TIED = dataclasses.replace(HIGH, init_scale=2.0**27)
LOW = funcamp.ScalerConfig(init_scale=8.0)
SGD = funcamp.stateless(torch.optim.SGD, lr=0.1)


def made(task: Task, config: funcamp.ScalerConfig = HIGH, **options: Any) -> funcamp.TrainStep:
    adamw = funcamp.stateless(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
    options = {"policy": "float16", "max_norm": 1.0, **options}
    return funcamp.make_train_step(funcamp.module_loss(task.model, task.criterion), adamw, config, **options)


def tree(state: Any) -> Any:
    return distributed.gather_state(state).params.tree()


def trained(step: Any, run: Any, batch: Callable[[int], Any], steps: int, flat: bool) -> tuple[Any, list[Any]]:
    """The last state, and of every step the loss, the norm, the scale and the flag."""
    state, seen = step.init(flat=flat), []
    for number in range(steps):
        state, metrics = run(state, batch(number))
        seen.append((metrics.loss.clone(), metrics.grad_norm.clone(), metrics.scale.item(), metrics.found_inf.item()))
    return state, seen


def compare(
    task: Task,
    steps: int = 24,
    compiled: Callable[[Any], Any] = lambda step: step,
    *,
    flat: bool = True,
    micro: int = 1,
    options: Any = None,
    **others: Any,
) -> Any:
    """Train on all ranks and on one, and compare; the last state of the ranks.

    options: of `DataParallel`.
    micro: the number of micro-batches.
    """

    def window(number: int) -> Any:
        return (
            task.batch(number) if micro == 1 else tuple(leaf.unflatten(0, (micro, -1)) for leaf in task.batch(number))
        )

    def part(number: int) -> Any:
        dim = int(micro > 1)
        return tuple(leaf.chunk(world(), dim)[rank()] for leaf in window(number))

    alone = made(task, accumulate=micro, **others)
    step = made(task, accumulate=micro, parallel=distributed.DataParallel(**(options or {})), **others)
    state, seen = trained(step, compiled(step), part, steps, flat)
    expected, expected_seen = trained(alone, alone, window, steps, flat)
    assert [row[2:] for row in seen] == [row[2:] for row in expected_seen], (seen, expected_seen)
    assert {row[3] for row in seen} == {0.0, 1.0}, "no step was skipped, or every one"
    for (loss, norm, _, found), (other, other_norm, *_) in zip(seen, expected_seen):
        torch.testing.assert_close(loss, other, rtol=2e-3, atol=2e-3)
        if not found:
            torch.testing.assert_close(norm, other_norm, rtol=2e-2, atol=1e-4)
    full = distributed.gather_state(state)
    assert_equal_on_all_ranks((seen[-1][:2], full))
    assert difference(tree(state), tree(expected)) < 0.02
    assert_same((full.step, full.skipped, full.scaler), (expected.step, expected.skipped, expected.scaler))
    return state


@case(2, 4)
def equals_one_process() -> None:
    for options in ({}, {"shard": True}):
        compare(mlp(), options=options)
        compare(tied(), config=HIGH_IF_TIED, options=options)
        compare(mlp(), 12, micro=2, options=options)
    compare(mlp(), flat=False)


@case(2)
def equals_one_process_in_parts_and_in_other_dtypes() -> None:
    for shard in (False, True):
        compare(mlp(), 12, options={"shard": shard, "buckets": 3})
        for dtype in (torch.float32, torch.bfloat16):
            compare(mlp(), 12, options={"shard": shard, "dtype": dtype})


@case(4)
def replicas_of_shards_equal_one_process() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for compiled in (lambda step: step, functools.partial(funcamp.jit, backend="eager")):
        compare(mlp(), 12, compiled, ema_decay=0.9, options={"group": mesh, "shard": True})


@case(2, 4)
def a_rank_stores_its_part_only() -> None:
    step = made(mlp(), ema_decay=0.9, parallel=distributed.DataParallel(shard=True))
    first = step.init()
    loaded = step.load_state_dict(step.state_dict(first), like=first)
    after, _ = step(first, mine(mlp().batch(0)))
    for state in (first, loaded, after):
        leaves = [leaf for leaf in _pytree.tree_leaves((state.params, state.opt_state)) if leaf.dim()]
        assert len(leaves) == 4 * len(state.params.groups)  # with two moments and the average
        for leaf in leaves:
            part = leaf.to_local()
            assert part.untyped_storage().nbytes() == 4 * part.numel() == 4 * leaf.numel() // world()


@case(4)
def groups_that_cannot_be_cut_evenly_and_complex_ones_equal_one_process() -> None:
    three = torch.distributed.new_group([0, 1, 2])
    if rank() == 3:
        return
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, generator=generator)
    params = {"w": torch.randn(3, dtype=torch.complex64, generator=generator), "v": torch.ones(70)}

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        loss: Tensor = (p["w"] * x).abs().square().mean() + p["v"].square().sum()
        return loss

    adam = funcamp.stateless(torch.optim.Adam, lr=0.1)
    alone = funcamp.make_train_step(loss_fn, adam)
    step = funcamp.make_train_step(loss_fn, adam, parallel=distributed.DataParallel(three, shard=True))
    state, expected = step.init(params), alone.init(params)
    for _ in range(3):
        state, metrics = step(state, x.chunk(3)[rank()])
        expected, expected_metrics = alone(expected, x)
        torch.testing.assert_close(metrics.grad_norm, expected_metrics.grad_norm)
    for name, value in expected.params.tree().items():
        torch.testing.assert_close(tree(state)[name], value)


def expected_collectives(state: Any, shard: bool) -> dict[str, int]:
    """The collectives of a step: for the gradients with the loss; sharded, for each group, the loss, norm and flag."""
    if not shard:
        return {"all_reduce": 1}
    groups = len(state.params.groups)
    return {"reduce_scatter_tensor": groups, "all_gather_into_tensor": groups, "all_reduce": 3}


@case(2)
def collectives_do_not_grow_with_the_number_of_parameters() -> None:
    batch = mine(mlp().batch(0))
    window = tuple(torch.stack([leaf] * 3) for leaf in batch)
    for shard in (False, True):
        for accumulate in (1, 3):
            step = made(mlp(), accumulate=accumulate, parallel=distributed.DataParallel(shard=shard))
            state = step.init()
            assert 2 < len(state.params.groups) < len(state.params.layout.slots)
            assert called(step, state, batch if accumulate == 1 else window) == expected_collectives(state, shard)
    step = made(mlp(), parallel=distributed.DataParallel())
    assert called(step, step.init(flat=False), batch) == {"all_reduce": 1}


@case(2)
def compiled_equals_one_process() -> None:
    for shard in (False, True):
        found: list[Counter[str]] = []

        def compiled(step: Any, found: list[Counter[str]] = found) -> Any:
            run, calls = counted(step)
            found.append(calls)
            return run

        if not shard or _upstream.VERSION >= (2, 13):  # Dynamo of 2.11 does not trace a step on DTensors
            state = compare(mlp(), 12, compiled, options={"shard": shard})
            assert found == [expected_collectives(state, shard)]
        # What generated code computes is of no account beside what is sent: two layers are less to compile.
        two = Task(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), mlp().criterion, mlp().batch)
        backend = "inductor" if shard else "eager"
        compare(two, 12, functools.partial(funcamp.jit, backend=backend), options={"shard": shard})


#: A product or a collective in a program of Inductor, in C++ or in Python.
CALL = re.compile(
    r"(?:cpu_|functional_|extern_kernels\.|torch\.ops\._c10d_functional\.)"
    r"(mm|addmm|all_reduce|all_gather_into_tensor|reduce_scatter_tensor|wait_tensor)(?:_out|_|\.default)?\("
)


def order_of_calls(wide: Task, shard: bool) -> tuple[list[str], int, int]:
    """The calls of a compiled step, and where its first product is and its last."""
    step = made(wide, policy="bfloat16", parallel=distributed.DataParallel(shard=shard, buckets=3))
    _, (program,) = run_and_get_code(functools.partial(funcamp.jit(step), step.init(), wide.batch(0)))
    calls = CALL.findall(program)
    products = [number for number, call in enumerate(calls) if call.endswith("mm")]
    return calls, products[0], products[-1]


@case(2)
def collectives_run_beside_computing() -> None:
    torch.manual_seed(0)
    large = nn.Sequential(*[nn.Linear(768, 768) for _ in range(3)])  # above what is summed together
    wide = Task(large, nn.functional.mse_loss, lambda _: (torch.randn(4, 768), torch.randn(4, 768)))
    calls, _, last = order_of_calls(wide, shard=False)
    assert calls.index("all_reduce") < last < calls.index("wait_tensor"), calls
    assert calls[:last].count("all_reduce") == 2, calls
    calls, first, last = order_of_calls(wide, shard=True)
    assert calls[:first].count("all_gather_into_tensor") == 6, calls
    assert calls[:first].count("wait_tensor") == 2, calls  # for the first layer's weight and bias
    assert calls[:last].count("reduce_scatter_tensor") == 4, calls
    assert calls[:last].count("wait_tensor") == 6, calls


@case(2, 4)
def an_overflow_on_one_rank_skips_on_all() -> None:
    for shard in (False, True):
        step = made(mlp(), LOW, parallel=distributed.DataParallel(shard=shard))
        before = step.init()
        x, y = mine(mlp().batch(0))
        for culprit in range(world()):
            after, metrics = step(before, (x * torch.inf if rank() == culprit else x, y))
            assert metrics.found_inf == 1.0
            assert_same((after.params, after.opt_state), (before.params, before.opt_state))
            assert after.scaler.scale == 4.0
        assert step(before, (x, y))[1].found_inf == 0.0


@case(2)
def a_function_of_the_flag_tells_all_ranks() -> None:
    """Every rank has gradients of its own; where one overflows, all skip."""
    step = funcamp.make_train_step(lambda p, x: (p["w"] * x).sum(), SGD, parallel=distributed.max_over())
    state = step.init({"w": torch.ones(2)})
    for run in (step, funcamp.jit(step, backend="eager", donate=False)):
        for value, skips in ((1.0, 0), (float("inf") if rank() else 1.0, 1)):
            after, metrics = run(state, torch.tensor([1.0, value]))
            assert metrics.found_inf == skips
            assert torch.equal(after.params["w"], state.params["w"]) == bool(skips)


@case(2)
def what_is_observed_is_that_of_one_process() -> None:
    observe = {"norm": lambda grads: {name: grad.norm() for name, grad in grads.items()}}
    alone = made(mlp(), LOW, policy=None, observe=observe)
    step = made(mlp(), LOW, policy=None, parallel=distributed.DataParallel(), observe=observe)
    _, metrics = step(step.init(), mine(mlp().batch(0)))
    _, expected = alone(alone.init(), mlp().batch(0))
    assert_equal_on_all_ranks(metrics.observed)
    assert difference(metrics.observed["norm"], expected.observed["norm"]) < 1e-5


@case(2)
def groups_of_hyperparameters_are_sharded_too() -> None:
    task = mlp()
    sgd = {
        label: funcamp.stateless(torch.optim.SGD, lr=lr, momentum=0.9)
        for label, lr in (("matrix", 0.1), ("vector", 0.0))
    }
    loss_fn = funcamp.module_loss(task.model, task.criterion)
    step = funcamp.make_train_step(loss_fn, funcamp.by_group(sgd), parallel=distributed.DataParallel(shard=True))
    alone = funcamp.make_train_step(loss_fn, funcamp.by_group(sgd))
    state, expected = step.init(), alone.init()
    for number in range(3):
        state, _ = step(state, mine(task.batch(number)))
        expected, _ = alone(expected, task.batch(number))
    assert difference(tree(state), tree(expected)) < 1e-5


# Weights.


@case(2, 4)
def uneven_batches_count_by_their_weight() -> None:
    task, sizes = mlp(), [5, 0, 8, 3][: world()]
    total = sum(sizes)
    parts = [torch.split(leaf[:total], sizes)[rank()] for leaf in task.batch(0)]
    alone = made(task, LOW)
    expected, expected_metrics = alone(alone.init(), tuple(leaf[:total] for leaf in task.batch(0)))
    weights: list[Callable[[Any], Any]] = [lambda batch: len(batch[0]), lambda batch: torch.ones_like(batch[1]).sum()]
    for weight in weights:
        for shard in (False, True):
            step = made(task, LOW, parallel=distributed.DataParallel(shard=shard), weight=weight)
            state, metrics = step(step.init(), tuple(parts))
            torch.testing.assert_close(metrics.loss, expected_metrics.loss, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(metrics.grad_norm, expected_metrics.grad_norm, rtol=1e-2, atol=1e-4)
            assert metrics.found_inf == 0.0
            assert difference(tree(state), tree(expected)) < 0.02


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
        assert_same((tree(state), metrics.loss), (tree(expected), expected_metrics.loss))


def linear(**options: Any) -> funcamp.TrainStep:
    """A step of `masked`, whose ranks count by their unmasked rows."""
    return funcamp.make_train_step(masked, SGD, parallel=distributed.DataParallel(**options), weight=tokens)


@case(2)
def a_rank_whose_examples_are_all_masked_changes_nothing() -> None:
    for dtype, shard in ((torch.float32, False), (torch.float32, True), (torch.float64, False)):
        x = torch.arange(12.0, dtype=dtype).view(4, 3)
        step = linear(shard=shard)
        mask = torch.full((4,), 1.0 - rank(), dtype=dtype)
        _, metrics = step(step.init({"w": torch.ones(3, dtype=dtype)}), (x + rank(), mask))
        assert metrics.found_inf == 0.0
        assert_same(metrics.loss, x.sum(1).mean())
        torch.testing.assert_close(metrics.grad_norm, x.mean(0).norm().float())


@case(2)
def a_weight_that_is_no_weight_skips_the_step() -> None:
    for weight in (-0.5, float("nan")):
        step = linear()
        mask = torch.full((4,), 1.0 if rank() == 0 else weight)
        _, metrics = step(step.init({"w": torch.ones(3)}), (torch.ones(4, 3), mask))
        assert metrics.found_inf == 1.0
        assert metrics.loss.isnan()


# Buffers.


@case(2)
def buffers_are_averaged_and_equal_on_all_ranks() -> None:
    task = cnn()
    batch = mine(task.batch(0))
    step = made(task, LOW, parallel=distributed.DataParallel())
    local = made(task, LOW, parallel=distributed.DataParallel(mean_buffers=False))
    after, kept = step(step.init(), batch)[0].buffers, local(local.init(), batch)[0].buffers
    assert_equal_on_all_ranks(after)
    mean = kept["1.running_mean"].clone()
    assert not torch.equal(mean, after["1.running_mean"])
    torch.distributed.all_reduce(mean)
    torch.testing.assert_close(after["1.running_mean"], mean / world())


@case(2)
def buffers_that_were_infinite_or_large_come_to_their_mean() -> None:
    def loss_fn(params: Any, buffers: Any, x: Tensor) -> Any:
        return (params["w"] * x).sum(), {name: torch.minimum(value, x.min()) for name, value in buffers.items()}

    step = funcamp.make_train_step(funcamp.loss(loss_fn, has_buffers=True), SGD, parallel=distributed.DataParallel())
    buffers = {"infinite": torch.tensor(float("inf")), "large": torch.tensor(1e9), "kept": torch.tensor(-1 / 3)}
    state, _ = step(step.init({"w": torch.ones(3)}, buffers), torch.full((3,), 1.0 + 2 * rank()))
    mean = torch.tensor(2.0)
    assert_same(state.buffers, {"infinite": mean, "large": mean, "kept": torch.tensor(-1 / 3)})


# The first state.


@case(2, 4)
def init_begins_with_the_first_ranks_values() -> None:
    expected = made(cnn()).init()
    parallels = [distributed.DataParallel(), distributed.DataParallel(shard=True)]
    if world() == 4:
        parallels.append(distributed.DataParallel(init_device_mesh("cpu", (2, 2)), shard=True))
    for parallel in parallels:
        task = cnn()
        with torch.no_grad():
            for value in (*task.model.parameters(), *task.model.buffers()):
                value.add_(rank())
        step = made(task, parallel=parallel)
        for consume in (False,) if parallel.shard else (False, True):
            state = step.init(consume=consume)
            assert_same((tree(state), state.buffers), (tree(expected), expected.buffers))
        if not parallel.shard:
            assert_same(dict(task.model.state_dict()), dict(cnn().model.state_dict()))


@case(2)
def ranks_that_begin_with_other_parameters_are_told() -> None:
    for params in ({"w": torch.ones(3 + rank())}, {"w": torch.ones(3)} if rank() else {"v": torch.ones(3)}):
        with pytest.raises(ValueError, match="must have the same names, shapes and dtypes on all ranks; on rank 0"):
            linear().init(params)


@case(2, 4)
def ranks_with_other_constants_are_told() -> None:
    def build(
        config: Any = funcamp.ScalerConfig(), lr: Any = 0.1, own: Any = None, keep: bool = False, **options: Any
    ) -> Any:
        parallel = distributed.DataParallel(**(own or {}))
        sgd = {label: funcamp.stateless(torch.optim.SGD, lr=lr) for label in ("matrix", "vector")}
        loss = funcamp.loss(lambda p, b, x: ((p["w"] * x).sum(), b), has_buffers=True, keep_buffers=keep)
        return funcamp.make_train_step(loss, funcamp.by_group(sgd), config, parallel=parallel, **options)

    other = rank() == world() - 1
    mesh = init_device_mesh("cpu", (2, world() // 2))
    for step, named in (
        (build(funcamp.ScalerConfig(init_scale=256.0 + other)), "on rank 0 init_scale of ScalerConfig is 256.0"),
        (build(lr=0.1 + other), f"on rank {world() - 1} .*lr=1.1"),
        (build(lr=torch.tensor(0.5 + other)), r"lr=tensor\(1.5000\)"),
        (build(max_norm=1.0 if other else None), "max_norm is 1.0"),
        (build(ema_decay=0.5 if other else None), "ema_decay is 0.5"),
        (build(policy="bfloat16" if other else None), "policy is .*bfloat16"),
        (build(own={"buckets": 1 + other}), "buckets of DataParallel is 2"),
        (build(own={"buckets": 1 + other, "group": mesh, "shard": True}), f"on rank {world() - 1} buckets"),
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
    build(lr=lambda applied: 0.1 / (1 + applied), max_norm=torch.tensor(1.0)).init({"w": torch.ones(3)})


# What is refused.


@case(2, 4)
def a_state_that_is_stored_otherwise_is_refused() -> None:
    alone, whole = made(mlp()), made(mlp(), parallel=distributed.DataParallel())
    sharded = made(mlp(), parallel=distributed.DataParallel(shard=True))
    batch = mine(mlp().batch(0))
    others = [whole]
    if world() == 4:
        mesh = init_device_mesh("cpu", (2, 2))
        others.append(made(mlp(), parallel=distributed.DataParallel(mesh, shard=True)))
    for other in others:
        with pytest.raises(ValueError, match="state must be sharded over this step's ranks"):
            sharded(other.init(), batch)
    for call in (whole, alone, alone.loss, lambda state, _: alone.compute_params(state)):
        with pytest.raises(ValueError, match="state must not be sharded"):
            call(sharded.init(), batch)
    with pytest.raises(TypeError, match=r"distributed\.gather_state makes them complete"):
        sharded.init().params.tree()


@case(2)
def what_cannot_be_sharded_is_refused() -> None:
    parallel = distributed.DataParallel(shard=True)
    step = made(mlp(), parallel=parallel)
    with pytest.raises(ValueError, match=r"init: flat must be True with DataParallel\(.*shard=True\); got False"):
        step.init(flat=False)
    with pytest.raises(ValueError, match=r"init: consume must be False with DataParallel\(.*shard=True\)"):
        step.init(consume=True)
    observe = {"found_inf_by_leaf": funcamp.found_inf_by_leaf}
    with pytest.raises(ValueError, match=r"observe must not be given with DataParallel\(.*shard=True\); got a dict"):
        made(mlp(), parallel=parallel, observe=observe)
    adafactor = funcamp.stateless(torch.optim.Adafactor)
    loss_fn = funcamp.module_loss(mlp().model, mlp().criterion)
    with pytest.raises(TypeError, match="only an elementwise optimizer takes them"):
        funcamp.make_train_step(loss_fn, adafactor, parallel=parallel).init()
    with pytest.raises(TypeError, match=r"parallel must be a distributed\.DataParallel or a function .* got 'all'"):
        made(mlp(), parallel="all")
