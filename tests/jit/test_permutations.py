"""The claim: rows taken by a new permutation, as in mixup, are those that the eager step takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import funcamp
from funcamp import jit
from tests.support.helpers import assert_same, clone
from tests.support.steps import assert_as_eager


@pytest.mark.inductor
def test_every_form_takes_the_rows_that_the_operations_do() -> None:
    def rows(x: Tensor, orders: list[Tensor]) -> list[Tensor]:
        first, second, few = orders
        found = [x[first], x.index_select(0, second), x[:, few], x[first[:2]], x[few], x.mT[few], x[second.flip(0)]]
        found += [first[first], second[second[:3]], x[first][first], x[:, None][second]]
        return [*found, x[second, torch.tensor([0, 1, 2, 0])], x.index_select(1, few), x[first[1:3]]]

    def step(state: Tensor, x: Tensor) -> Any:
        orders = [torch.randperm(4), torch.randperm(4), torch.randperm(3)]
        return state + x, (rows(x, orders), orders)

    run, x = jit(step, donate=False), torch.arange(12.0).view(4, 3)
    for seed in range(3):
        torch.manual_seed(seed)
        _, (found, orders) = run(torch.zeros(4, 3), x)
        assert [order.sort().values.tolist() for order in orders] == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2]]
        assert_same(clone(found), rows(x, list(orders)))


@pytest.mark.inductor
def test_a_permutation_of_more_rows_than_there_are_is_an_error() -> None:
    def step(state: Tensor, x: Tensor) -> Any:
        return state + x[torch.randperm(5)].sum(), ()

    state = torch.zeros(())
    with pytest.raises((RuntimeError, IndexError)):
        jit(step)(state, torch.ones(4, 3))
    assert state == 0


def mixup(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Each example and its target mixed with another one's; rows of a result that has a gradient too."""
    x, target = batch
    order = torch.randperm(x.shape[0])
    hidden = torch.tanh((0.7 * x + 0.3 * x[order]) @ params["w"])
    out = 0.7 * hidden + 0.3 * hidden[order]
    return 0.7 * F.cross_entropy(out, target) + 0.3 * F.cross_entropy(out, target[order])


@pytest.mark.thorough
@pytest.mark.inductor
def test_mixup_follows_the_eager_step() -> None:
    step = funcamp.make_train_step(mixup, funcamp.stateless(torch.optim.SGD, lr=0.1))
    state = step.init({"w": torch.linspace(-1, 1, 24).view(6, 4)})
    assert_as_eager(step, jit(step), state, [(torch.randn(8, 6), torch.arange(8) % 4)] * 3, 1e-5)
