"""What a rank sends and stores: counted in one process, as the first of four."""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils import _pytree

import funcamp
from funcamp import distributed
from funcamp.distributed import DataParallel
from tests.support.generated import written
from tests.support.helpers import assert_same
from tests.support.models import Task, mlp
from tests.support.operations import Operations
from tests.support.steps import build

pytestmark = pytest.mark.usefixtures("rank_0_of_4")

ADAMW = funcamp.stateless(torch.optim.AdamW)


#: Operations on what a collective has made.
LATER = {"_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd"}


def collectives(fn: Any, *args: Any) -> dict[str, int]:
    """The collectives of one call."""
    with Operations() as ran:
        fn(*args)
    return {name.split(".")[1]: ran.counts[name] for name in ran.counts.keys() - LATER if "c10d" in name}


@pytest.mark.parametrize("shard", [False, True])
def test_collectives_do_not_grow_with_the_parameters_or_the_micro_batches(shard: bool) -> None:
    x, y = mlp().batch(0)
    for accumulate in (1, 3):
        options: Any = {"accumulate": accumulate, "parallel": DataParallel(shard=shard)}
        step = build(mlp(), ADAMW, policy="float16", max_norm=1.0, **options)
        batch = (x, y) if accumulate == 1 else (torch.stack([x] * 3), torch.stack([y] * 3))
        state = step.init()
        groups = len(state.params.groups)
        assert 2 < groups < len(state.params.layout.slots)
        # Of the gradients with the loss; or of each group, and of the loss, the norm and the flag.
        of_groups = {"reduce_scatter_tensor": groups, "all_gather_into_tensor": groups, "all_reduce": 3}
        assert collectives(step, state, batch) == (of_groups if shard else {"all_reduce": 1})
        if not shard:
            assert collectives(step, step.init(flat=False), batch) == {"all_reduce": 1}


def test_a_flag_is_one_collective_for_any_number_of_gradients() -> None:
    plain, mesh = [torch.ones(4) for _ in range(30)], init_device_mesh("cpu", (4,))
    of_dtensors = [distribute_tensor(grad, mesh, [Shard(0)]) for grad in plain]
    for grads, reduce in ((plain, distributed.max_over()), (of_dtensors, None)):
        check = functools.partial(funcamp.unscale_and_check, reduce=reduce)
        for count in (1, 30):
            assert collectives(check, funcamp.init(), grads[:count]) == {"all_reduce": 1}


def test_a_rank_stores_its_part_only() -> None:
    step = build(mlp(), ADAMW, ema_decay=0.9, parallel=DataParallel(shard=True))
    first = step.init()
    saved = step.state_dict(first)
    assert collectives(step.load_state_dict, saved, first) == {}
    loaded = step.load_state_dict(saved, like=first)
    after, _ = step(first, mlp().batch(0))
    for state in (first, loaded, after):
        leaves = [leaf for leaf in _pytree.tree_leaves((state.params, state.opt_state)) if leaf.dim()]
        assert len(leaves) == 4 * len(state.params.groups)  # with two moments and the average
        for leaf in leaves:
            part = leaf.to_local()
            assert part.untyped_storage().nbytes() == 4 * part.numel() == leaf.numel()


def test_ranks_compile_every_program_at_once_so_that_none_rounds_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "funcamp")
    step = build(mlp(), ADAMW, parallel=DataParallel())
    run, state = funcamp.jit(step, backend="aot_eager"), step.init()
    x, y = mlp().batch(0)
    for rows in (8, 4):
        state, _ = run(state, (x[:rows], y[:rows]))
    assert "one by one" not in caplog.text


def test_a_gathered_state_keeps_its_values_while_the_step_goes_on() -> None:
    step = build(mlp(), ADAMW, parallel=DataParallel(shard=True))
    run = funcamp.jit(step, backend="eager")
    state, _ = run(step.init(), mlp().batch(0))
    kept = distributed.gather_state(state)
    expected = funcamp.clone(kept)
    for number in range(2):
        state, _ = run(state, mlp().batch(number))
    assert_same(kept, expected)


@pytest.mark.compiled
@pytest.mark.inductor
def test_collectives_run_beside_computing() -> None:
    large = nn.Sequential(*[nn.Linear(768, 768) for _ in range(3)])  # above what is summed together
    batch = torch.randn(4, 768), torch.randn(4, 768)
    for shard in (False, True):
        parallel = DataParallel(shard=shard, buckets=3)
        step = build(Task(large, nn.functional.mse_loss, mlp().batch), policy="bfloat16", parallel=parallel)
        program = written(funcamp.jit(step, without=["products"]), step.init(), batch)
        kinds = "mm|all_reduce|all_gather_into_tensor|reduce_scatter_tensor|wait_tensor"
        prefixes = r"cpu_|functional_|extern_kernels\.|torch\.ops\._c10d_functional\."
        # torch 2.11 and 2.15 look a collective up by its name, a string that is an argument of a call in a call.
        calls = re.findall(rf"(?:{prefixes})(?:add)?({kinds})(?:_out|_|\.default)?(?:\(|\"\)\))", program)
        first, last = calls.index("mm"), len(calls) - 1 - calls[::-1].index("mm")
        before_last = Counter(calls[:last])
        if shard:
            assert Counter(calls[:first]) == {"all_gather_into_tensor": 6, "wait_tensor": 2}  # one layer
            assert (before_last["reduce_scatter_tensor"], before_last["wait_tensor"]) == (4, 6), calls
        else:
            assert (before_last["all_reduce"], before_last["wait_tensor"]) == (2, 0), calls
