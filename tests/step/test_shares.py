"""Micro-batches that count by their tokens: the step of the mean over all tokens of the window."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcamp import make_train_step, stateless
from tests.support.helpers import assert_same
from tests.support.masked import masked, tokens
from tests.support.models import Task
from tests.support.steps import build, compiled, eager, eager_and_traced, traced

SGD = stateless(torch.optim.SGD, lr=0.5)
WRAPS: dict[str, Any] = {
    "eager": eager,
    "jit": traced,
    "compiled": compiled,
}


def window(counts: list[int], rows: int = 8) -> tuple[Tensor, Tensor]:
    """Micro-batches of whole numbers, whose products and sums are exact, with so many rows that count."""
    x = torch.randint(-8, 9, (len(counts), rows, 4), generator=torch.Generator().manual_seed(0)).float()
    return x, torch.stack([(torch.arange(rows) < count).float() for count in counts])


def run(weight: Any, batch: Any, wrap: Any = eager, **options: Any) -> Any:
    step = make_train_step(masked, SGD, **{"accumulate": 4, "weight": weight} | options)
    return wrap(step)(step.init({"w": torch.ones(4)}), batch)


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("counts", [[8, 0, 7, 1], [2, 6]], ids=str)
@pytest.mark.parametrize("wrap", WRAPS)
def test_step_is_that_of_the_mean_over_all_tokens(wrap: str, counts: list[int]) -> None:
    x, mask = window(counts)
    assert sum(counts) in (8, 16)  # so that no share is rounded
    state, metrics = run(tokens, (x, mask), WRAPS[wrap])
    joined = (x.flatten(0, 1), mask.flatten())
    expected, expected_metrics = run(None, joined, accumulate=1)
    assert_same((state, metrics[:2]), (expected, expected_metrics[:2]))
    assert_same(run(tokens, joined, accumulate=1)[0], expected)


@pytest.mark.compiled
@eager_and_traced
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("low", [-1.0, 0.0, math.nan, math.inf])
def test_window_without_a_usable_weight_is_skipped(low: float, accumulate: int, wrap: Any) -> None:
    batch = window([4, 8]) if accumulate == 2 else tuple(leaf[0] for leaf in window([4]))
    state, metrics = run(lambda batch: batch[1].sum() * 0 + low, batch, wrap, accumulate=accumulate)
    assert (metrics.found_inf, state.scaler.scale) == (1, 2.0**15)
    assert_same(state.params["w"], torch.ones(4))


def test_micro_batch_without_weight_leaves_buffers_alone() -> None:
    def made(**options: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 16))
        return build(Task(model, nn.functional.mse_loss, lambda _: batch), SGD, policy="bfloat16", **options)

    x = torch.randn(3, 8, 16)
    batch = torch.stack([x[0], x[1] * math.nan, x[2]]), torch.randn(3, 8, 16)
    step = made(accumulate=3, weight=lambda batch: batch[0].isfinite().all().float())
    both = made(accumulate=2)
    state, metrics = step(step.init(), batch)
    expected, _ = both(both.init(), tuple(leaf[::2] for leaf in batch))
    assert metrics.found_inf == 0
    assert_same(state.buffers, expected.buffers)
