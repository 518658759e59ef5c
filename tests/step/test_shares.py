"""Micro-batches that count by their tokens: the step of the mean over all tokens of the window."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcamp import ScalerConfig, jit, make_train_step, module_loss, stateless
from tests.support.helpers import assert_same, clone
from tests.support.masked import masked, tokens

IGNORED = -100
SGD = stateless(torch.optim.SGD, lr=0.5)
Wrap = Callable[[Any], Any]
WRAPS: dict[str, Wrap] = {
    "eager": lambda step: step,
    "jit": functools.partial(jit, backend="eager"),
    "compiled": functools.partial(torch.compile, backend="aot_eager", fullgraph=True),
}


def window(counts: list[int], rows: int = 8) -> tuple[Tensor, Tensor]:
    """Micro-batches of whole numbers, whose products and sums are exact, with so many rows that count."""
    x = torch.randint(-8, 9, (len(counts), rows, 4), generator=torch.Generator().manual_seed(0)).float()
    return x, torch.stack([(torch.arange(rows) < count).float() for count in counts])


def run(weight: Any, batch: Any, wrap: Wrap = WRAPS["eager"], **options: Any) -> Any:
    step = make_train_step(masked, SGD, accumulate=4, weight=weight, **options)
    return wrap(step)(step.init({"w": torch.ones(4)}), batch)


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("counts", [[1, 4, 8, 3], [8, 0, 7, 1], [2, 6]], ids=str)
def test_step_is_that_of_the_mean_over_all_tokens(counts: list[int], wrap: Wrap) -> None:
    x, mask = window(counts)
    state, metrics = run(tokens, (x, mask), wrap)
    whole = (x.flatten(0, 1), mask.flatten())
    alone = make_train_step(masked, SGD)
    expected, expected_metrics = alone(alone.init({"w": torch.ones(4)}), whole)
    assert sum(counts) in (8, 16)  # so that no share is rounded
    assert_same(state, expected)
    assert_same(metrics.loss, expected_metrics.loss)
    assert_same(metrics.grad_norm, expected_metrics.grad_norm)
    if len(set(counts)) > 1:
        unweighted, _ = run(None, (x, mask.clamp(min=1e-3)))
        assert not torch.equal(unweighted.params["w"], state.params["w"])


def test_weight_is_called_with_one_micro_batch_and_may_return_a_number() -> None:
    seen: list[Any] = []

    def weight(batch: Any) -> float:
        seen.append(tuple(batch[0].shape))
        return 2.0

    batch = window([8, 8, 8])
    state, metrics = run(weight, batch)
    assert seen == [(8, 4)] * 3
    expected, expected_metrics = run(None, batch)
    torch.testing.assert_close(state.params["w"], expected.params["w"])
    torch.testing.assert_close(metrics.loss, expected_metrics.loss)


def test_weights_are_exact_in_float64() -> None:
    x, mask = (leaf.double() for leaf in window([1, 4, 5]))
    step = make_train_step(masked, SGD, accumulate=4, weight=tokens)
    state, metrics = step(step.init({"w": torch.ones(4, dtype=torch.float64)}), (x, mask))
    grad = (x * mask[..., None]).sum((0, 1)) / 10
    torch.testing.assert_close(state.params["w"], 1 - 0.5 * grad, rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(metrics.loss, grad.sum(), rtol=1e-15, atol=1e-15)


def test_without_micro_batches_a_weight_changes_nothing() -> None:
    x, mask = window([5])
    results = []
    for weight in (None, tokens):
        step = make_train_step(masked, SGD, weight=weight)
        results.append(step(step.init({"w": torch.ones(4)}), (x[0], mask[0])))
    assert_same(results[1], results[0])


@pytest.mark.compiled
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_window_without_weight_is_skipped_and_leaves_the_scale(wrap: Wrap, accumulate: int) -> None:
    momentum = stateless(torch.optim.SGD, lr=0.1, momentum=0.9)
    config = ScalerConfig(init_scale=8.0, growth_interval=2)
    step = make_train_step(masked, momentum, config, accumulate=accumulate, weight=tokens)
    take = wrap(step)
    good, empty = window([4, 8]), window([0, 0])
    if accumulate == 1:
        good, empty = (good[0][0], good[1][0]), (empty[0][0], empty[1][0])
    before, _ = take(step.init({"w": torch.ones(4)}), good)
    before = clone(before)
    after, metrics = take(clone(before), empty)
    assert (metrics.found_inf, metrics.skipped, metrics.consecutive_skips, metrics.applied) == (0, 1, 1, 1)
    assert_same((after.scaler, after.params, after.opt_state), (before.scaler, before.params, before.opt_state))
    after, metrics = take(after, good)
    assert (metrics.skipped, metrics.consecutive_skips, after.scaler.scale) == (1, 0, 16)


@pytest.mark.parametrize("low", [-1.0, math.nan, math.inf])
def test_window_without_a_usable_weight_is_skipped(low: float) -> None:
    before = torch.ones(4)
    state, metrics = run(lambda batch: batch[1].sum() * 0 + low, window([4, 8]))
    assert metrics.found_inf == 1
    assert_same(state.params["w"], before)


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (lambda batch: batch[1], ValueError, r"a tensor of shape \(\); got a torch.float32 tensor of shape \(8,\)"),
        (lambda _: -1, ValueError, "0 or a positive number; got -1"),
        (lambda _: math.nan, ValueError, "0 or a positive number; got nan"),
        (lambda _: math.inf, ValueError, "0 or a positive number; got inf"),
        (lambda _: None, TypeError, r"a number or a tensor of shape \(\); got None"),
    ],
)
def test_weight_must_be_a_number_or_a_scalar(weight: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"step: weight must return {message}"):
        run(weight, window([4, 8]))


class Words(nn.Module):
    """A model with dropout and a normalization, for rows of words."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.norm = nn.Embedding(12, 16), nn.LayerNorm(16)
        self.layer, self.drop, self.head = nn.Linear(16, 16), nn.Dropout(0.1), nn.Linear(16, 12)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.drop(torch.tanh(self.layer(self.norm(self.words(words))))))
        return logits


def criterion(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


def sentences(step: int) -> tuple[Tensor, Tensor]:
    """Three micro-batches of four sentences of any length."""
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(12, (3, 4, 9), generator=generator)
    lengths = torch.randint(1, 10, (3, 4, 1), generator=generator)
    return words, torch.where(torch.arange(9) < lengths, words, IGNORED)


@pytest.mark.compiled
@pytest.mark.parametrize("wrap", [WRAPS["eager"], WRAPS["jit"]], ids=["eager", "jit"])
def test_float16_run_equals_torchs_loop_with_weighted_losses(wrap: Wrap) -> None:
    numbers: Any = {"init_scale": 2.0**20, "growth_interval": 4}
    model = Words()
    step = make_train_step(
        module_loss(model, criterion),
        stateless(torch.optim.AdamW, lr=1e-2),
        ScalerConfig(**numbers),
        policy="float16",
        accumulate=3,
        weight=lambda batch: (batch[1] != IGNORED).sum(),
    )
    call, state = wrap(step), step.init()
    adamw, scaler = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", **numbers)
    seen, expected = [], []
    for number in range(12):
        words, labels = sentences(number)
        torch.manual_seed(number)
        state, metrics = call(state, (words, labels))
        seen.append((metrics.found_inf.item(), state.scaler.scale.item(), clone(state.params.tree())))
        torch.manual_seed(number)
        counts = (labels != IGNORED).sum((1, 2)).double()
        for part in range(3):
            with torch.autocast("cpu", torch.float16):
                loss = criterion(model(words[part]), labels[part]) * (counts[part] / counts.sum()).float()
            scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(adamw)
        scaler.update()
        adamw.zero_grad()
        params = {name: value.detach().clone() for name, value in model.named_parameters()}
        expected.append((float(scaler.get_scale() < before), scaler.get_scale(), params))
    assert {skipped for skipped, _, _ in expected} == {0.0, 1.0}
    assert_same(seen, expected)


@pytest.mark.thorough(keep=1)
@pytest.mark.compiled
@pytest.mark.parametrize("wrap", [WRAPS["eager"], WRAPS["jit"]], ids=["eager", "jit"])
def test_micro_batch_without_weight_leaves_buffers_alone(wrap: Wrap) -> None:
    def made(**options: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 16))
        return make_train_step(module_loss(model, nn.functional.mse_loss), SGD, policy="bfloat16", **options)

    x = torch.randn(3, 8, 16)
    batch = torch.stack([x[0], x[1] * math.nan, x[2]]), torch.randn(3, 8, 16)
    step = made(accumulate=3, weight=lambda batch: batch[0].isfinite().all().float())
    both = made(accumulate=2)
    state, metrics = wrap(step)(step.init(), batch)
    expected, _ = wrap(both)(both.init(), tuple(leaf[::2] for leaf in batch))
    assert metrics.found_inf == 0
    assert_same(state.buffers, expected.buffers)
