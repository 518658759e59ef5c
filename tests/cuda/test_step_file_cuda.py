"""On a GPU: a step from a file is captured at its first call, and its replays are those of the step that was saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from funcamp import ScalerConfig, clone, jit, load_step, stateless
from tests.support.helpers import assert_no_sync, assert_same
from tests.support.models import mlp, on_gpu
from tests.support.steps import build

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("capture", [True, False])
def test_a_step_from_a_file_replays_the_same_bits(capture: bool, tmp_path: Path) -> None:
    task = on_gpu(mlp(dropout=0.3))
    # 2**24 overflows float16 at the first steps.
    step = build(task, stateless(torch.optim.AdamW), config=ScalerConfig(2.0**24), policy="float16", max_norm=1.0)
    run, first = jit(step, capture=capture), step.init()
    batches = [task.batch(number) for number in range(8)]
    run(clone(first), batches[0])
    run.save(tmp_path / "step.pt", example_state=first)
    loaded = load_step(tmp_path / "step.pt")
    found, expected = clone(loaded.example_state), clone(first)
    assert_same(found, expected)
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        expected, expected_metrics = run(expected, batch)
        torch.manual_seed(number)
        found, metrics = loaded(found, batch)
        assert_same((found, tuple(metrics)), (expected, tuple(expected_metrics)))
    assert found.skipped > 0
    with assert_no_sync():
        loaded(found, batches[0])


def test_a_step_with_a_metric_on_the_host_and_a_batch_that_begins_anywhere(tmp_path: Path) -> None:
    def step(state: dict[str, Tensor], batch: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        total = state["total"] + (batch * 2).sum()
        return {"total": total}, {"constant": torch.tensor(0.25) * 2, "doubled": batch * 2}

    run, data = jit(step, capture=False), torch.arange(64.0, device="cuda")
    first, _ = run({"total": torch.zeros((), device="cuda")}, data[:32])
    run.save(tmp_path / "step.pt", example_state=first)
    loaded = load_step(tmp_path / "step.pt")
    current = loaded.example_state
    for start in range(4):
        expected = data[start : start + 32]
        current, metrics = loaded(current, expected)
        assert_same((metrics["doubled"], metrics["constant"].item()), (expected * 2, 0.5))
