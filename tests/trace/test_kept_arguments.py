"""A tensor of the batch that a model keeps as it is: state of a former call, refused by name like any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from funcamp import jit, make_train_step, module_loss, stateless

X = torch.linspace(-1, 1, 8).view(2, 4)


class Keeps(nn.Module):
    """Keeps what it is given."""

    prev: Tensor | None = None

    def __init__(self, use: Callable[[Keeps, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(4, 2), use

    def forward(self, x: Tensor) -> Any:
        return self.linear(self.use(self, x))


def last_batch(module: Keeps, x: Tensor) -> Tensor:
    before, module.prev = module.prev, x
    return x if before is None else x * before


def first_batch(module: Keeps, x: Tensor) -> Tensor:
    if module.prev is None:
        module.prev = x
    return x - module.prev


def unread(module: Keeps, x: Tensor) -> Tensor:
    module.prev = x
    return x


@pytest.mark.compiled
@pytest.mark.parametrize("use", [last_batch, first_batch])
def test_what_later_calls_would_read_is_refused_by_name(use: Any) -> None:
    step = make_train_step(module_loss(Keeps(use), nn.functional.mse_loss), stateless(torch.optim.SGD, lr=0.1))
    with pytest.raises(RuntimeError, match=r"jit: step must not keep.*prev"):
        jit(step, backend="eager")(step.init(), (X, torch.ones(2, 2)))


@pytest.mark.compiled
def test_what_nothing_reads_has_its_values() -> None:
    module = Keeps(unread)
    step = make_train_step(module_loss(module, nn.functional.mse_loss), stateless(torch.optim.SGD, lr=0.1))
    run = jit(step, backend="eager")
    state, metrics = run(step.init(), (X, torch.ones(2, 2)))
    assert not isinstance(module.prev, FakeTensor)
    assert torch.equal(module.prev if module.prev is not None else torch.zeros(()), X)
    expected = step(step.init(), (X, torch.ones(2, 2)))[1]
    assert torch.equal(metrics.loss, expected.loss)
    run(state, (X[:1], torch.ones(1, 2)))
