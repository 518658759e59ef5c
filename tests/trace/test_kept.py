"""What a jitted step's Python keeps of its one run is what an eager step would have kept: caches, views, modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcamp import jit, make_train_step, module_loss
from tests.support.helpers import assert_same
from tests.support.steps import SGD

X = torch.tensor([1.0, 2.0, 3.0])


class Lazy:
    """Makes a tensor once and keeps it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self.held = make, None

    def __call__(self) -> Any:
        if self.held is None:
            self.held = self._make()
        return self.held


def table() -> Tensor:
    """The sines and cosines of positions, as tutorials fill them in."""
    made = torch.zeros(3, 4)
    angles = torch.arange(3.0)[:, None] * torch.tensor([1.0, 0.1])
    made[:, 0::2], made[:, 1::2] = angles.sin(), angles.cos()
    return made


def read_before_it_is_written() -> list[Tensor]:
    written = torch.zeros(3)
    before = written + 1
    return [written.add_(1), before]


def base_and_view() -> list[Tensor]:
    base = torch.arange(3.0)
    view = base[1:]
    view.mul_(2)
    return [base, view]


MADE: dict[str, Callable[[], Any]] = {
    "filled through slices": table,
    "a tensor and a view of it": base_and_view,
    "a tensor that is read before it is written": read_before_it_is_written,
}


@pytest.mark.parametrize("name", MADE)
def test_a_cache_has_the_values_of_eager_code(name: str) -> None:
    lazy, expected = Lazy(MADE[name]), MADE[name]()

    def step(state: Tensor, batch: Tensor) -> Any:
        held = lazy()
        return state + batch.sum(), (held[0] if isinstance(held, list) else held).sum()

    run, state = jit(step, backend="eager"), torch.zeros(())
    for batch in (X, X, torch.ones(3, 2)):  # the last shape meets what the first left
        state, _ = run(state, batch)
    assert_same(lazy.held, expected)
    assert type(lazy.held) is type(expected)


def test_what_is_kept_of_a_write_that_is_refused_is_not_computed() -> None:
    own = torch.ones(3)
    lazy = Lazy(lambda: own.add_(1) * 2)
    with pytest.raises(RuntimeError, match="write into nothing but its state"):
        jit(lambda state, batch: (state + batch.sum(), lazy().sum()), backend="eager")(torch.zeros(()), X)
    assert_same(own, torch.ones(3))
    assert lazy.held is None


class KeepsItsBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        self.last = x
        return self.linear(x)


def test_a_part_of_the_batch_that_nothing_reads_again_may_be_kept(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = KeepsItsBatch(), (torch.ones(2, 3), torch.zeros(2, 3))
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    run = jit(step, backend="eager")
    state, metrics = run(step.init(), batch)
    assert isinstance(model.last, Tensor)
    assert model.last.is_meta
    assert model.last.shape == batch[0].shape
    assert_same(metrics.loss, step(step.init(), batch)[1].loss)
    assert "on meta" in caplog.text
    assert "model.last" in caplog.text
    run(state, (torch.ones(1, 3), torch.zeros(1, 3)))


def test_recurrent_layers_keep_their_weights(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.LSTM(3, 3, num_layers=2))
    step = make_train_step(module_loss(model, lambda out, y: F.mse_loss(out[0], y)), SGD)
    batch = torch.ones(2, 1, 3), torch.zeros(2, 1, 3)
    assert_same(jit(step, backend="eager", donate=False)(step.init(), batch), step(step.init(), batch))
    layer: Any = model[0]
    names = layer._flat_weights_names
    assert all(value is getattr(layer, name) for name, value in zip(names, layer._flat_weights))
    assert not caplog.records
