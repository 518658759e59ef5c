"""On a GPU: `jit` captures a step into one CUDA graph; replays are the eager steps, sync nothing, and lose nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import MetricReader, ScalerConfig, clone, jit, stateless
from tests.support.helpers import assert_close, assert_no_sync, assert_same, to
from tests.support.launch import BOUND, ENVIRONMENT, ROOT
from tests.support.models import Task, cnn, mlp, on_gpu
from tests.support.patterns import PATTERNS, state, step_of
from tests.support.scaled import scaled
from tests.support.steps import build

pytestmark = pytest.mark.cuda

# 2**24 overflows float16 at the first steps; the interval lets the scale climb into overflow again and again.
CONFIG = ScalerConfig(init_scale=2.0**24, growth_interval=5)


def adamw_step(task: Task, **options: Any) -> Any:
    return build(task, stateless(torch.optim.AdamW, lr=1e-2), config=CONFIG, policy="float16", **options)


@pytest.mark.parametrize("donate", [True, False])
def test_a_thousand_replays_are_the_same_program_called(donate: bool) -> None:
    task = on_gpu(mlp())
    step = adamw_step(task, max_norm=1.0)
    # Of one graph Inductor loads the same kernels for both; with other options it would tune them apart.
    run, plain = jit(step, donate=donate), jit(step, donate=donate, capture=False)
    replayed, called = step.init(), step.init()
    batches = [task.batch(index) for index in range(8)]
    skipped = []
    for index in range(1000):
        replayed, found = run(replayed, batches[index % 8])
        called, expected = plain(called, batches[index % 8])
        skipped.append(expected.found_inf)
        if index % 100 == 0:
            assert_same((replayed, tuple(found)), (called, tuple(expected)))
    assert_same(replayed, called)
    assert {0.0, 1.0} == set(torch.stack(skipped).tolist())


def test_a_thousand_steps_with_logging_do_not_sync() -> None:
    task = mlp(dropout=0.5)
    step = adamw_step(on_gpu(task), max_norm=1.0, ema_decay=0.9)
    run, current, reader = jit(step), step.init(), MetricReader(limit=2000)
    pinned = [leaf.pin_memory() for leaf in task.batch(0)]
    current, _ = run(current, tuple(pinned))
    rows = []
    with assert_no_sync():
        for _ in range(1000):
            current, metrics = run(current, tuple(pinned))
            reader.put(metrics)
            rows += reader.ready()
    rows += reader.drain()
    assert len(rows) == 1000
    assert all(isinstance(row.loss, float) for row in rows)


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern_is_the_eager_step(name: str) -> None:
    step = step_of(PATTERNS[name])
    start = to(state(), "cuda")
    expected, run, actual = clone(start), jit(step), clone(start)
    for index in range(3):
        batch = torch.full((2,), float(index), device="cuda")
        expected, metrics = step(expected, batch)
        expected = {key: torch.empty_like(start[key]).copy_(leaf) for key, leaf in expected.items()}
        actual, found = run(actual, batch)
        assert_same((actual, found), (expected, metrics))


def test_dropout_draws_anew_at_every_replay_and_again_from_a_seed() -> None:
    def step(state: Any, batch: Tensor) -> Any:
        return {"n": state["n"] + 1}, torch.nn.functional.dropout(batch, 0.5)

    def draws() -> list[Tensor]:
        torch.manual_seed(5)
        run, current, rows = jit(step), {"n": torch.zeros((), device="cuda")}, []
        for _ in range(4):
            current, row = run(current, torch.ones(1000, device="cuda"))
            rows.append(row)
        return rows

    first, second = draws(), draws()
    assert_same(first, second)
    assert len({tuple(row.tolist()) for row in first}) == 4


def test_two_shapes_and_an_unrolled_step() -> None:
    def step(state: Any, batch: Tensor) -> Any:
        return {"x": state["x"] * 0.5 + batch.sum()}, batch.mean()

    run, current = jit(step), {"x": torch.zeros((), device="cuda")}
    total = 0.0
    for size in (2, 3, 2, 3):
        current, _ = run(current, torch.ones(size, device="cuda"))
        total = total * 0.5 + size
    assert current["x"].item() == total
    after, means = jit(step, unroll=4)({"x": torch.zeros((), device="cuda")}, torch.ones(4, 3, device="cuda"))
    assert after["x"].item() == ((3 * 0.5 + 3) * 0.5 + 3) * 0.5 + 3
    assert means.tolist() == [1.0] * 4


def test_tokens_in_uint16_are_a_batch() -> None:
    def step(state: Any, tokens: Tensor) -> Any:
        return {"sum": state["sum"] + tokens.long().sum()}, tokens

    run, current = jit(step), {"sum": torch.tensor(0, device="cuda")}
    for number in range(3):
        tokens = torch.full((3,), number, dtype=torch.uint16, device="cuda")
        current, returned = run(current, tokens)
        assert_same(returned, tokens)
    assert current["sum"].item() == 9


@pytest.mark.parametrize("capture", [True, False])
def test_a_callers_autocast_casts_nothing_in_a_program(capture: bool) -> None:
    """Inductor calls torch's convolution, which would cast to the region's dtype."""
    task = on_gpu(cnn())
    step = build(task, stateless(torch.optim.AdamW), policy="bfloat16")
    run, inside, alone = jit(step, capture=capture), step.init(), step.init()
    for index in range(3):
        alone, expected = run(alone, task.batch(index))
    run = jit(step, capture=capture)
    for index in range(3):
        with torch.autocast("cuda", torch.float16):
            inside, metrics = run(inside, task.batch(index))
    assert_close((inside.params.tree(), metrics.loss), (alone.params.tree(), expected.loss), 1e-3)


def test_a_step_that_cannot_be_captured_is_an_error_and_leaves_the_process_usable() -> None:
    def step(state: Any, batch: Tensor) -> Any:
        return {"x": state["x"] + batch.sum()}, batch.cpu().sum()

    current = {"x": torch.zeros((), device="cuda")}
    with pytest.raises(RuntimeError, match=r"one type of device; .*batch\.cpu\(\).* moves a tensor to cpu"):
        jit(step)(current, torch.ones(2, device="cuda"))
    assert (current["x"] + 1).item() == 1


def test_an_operation_illegal_in_a_capture_is_named_and_spoils_nothing() -> None:
    command = [sys.executable, "-m", "tests.cuda.failed_capture"]
    environment = {**ENVIRONMENT, "PYTHONWARNINGS": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=BOUND)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for error in found["errors"]:
        assert error.startswith("jit: the step could not be captured into one CUDA graph: "), error
        assert "capturing" in error, error  # the operation's own error, not that of the capture's end
    assert len(found["errors"]) == 3
    assert found["same_stream"] == [True, True]
    assert (found["kept"], found["total"]) == (0.0, 10.0)
    assert len({tuple(row) for row in [found["drawn"], *found["rows"]]}) == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_number_in_a_tensor_is_rounded_where_eager_code_rounds_it(dtype: torch.dtype) -> None:
    torch.testing.assert_close(*scaled(dtype, "cuda"))
