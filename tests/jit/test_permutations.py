"""The claim: rows taken by a new permutation, as in mixup, are those that the eager step takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import jit
from tests.support.helpers import assert_same, clone


@pytest.mark.inductor
def test_every_form_takes_the_rows_that_the_operations_do() -> None:
    def rows(x: Tensor, orders: list[Tensor]) -> list[Tensor]:
        first, second, few = orders
        found = [x[first], x.index_select(0, second), x[:, few], x[first[:2]], x.mT[few], x[second.flip(0)]]
        return [*found, first[first], x[first][first], x[:, None][second], x[second, torch.tensor([0, 1, 2, 0])]]

    def step(state: Tensor, x: Tensor) -> Any:
        orders = [torch.randperm(4), torch.randperm(4), torch.randperm(3)]
        return state + x, (rows(x, orders), orders)

    run, x = jit(step, donate=False), torch.arange(12.0).view(4, 3)
    first_orders = []
    for seed in range(3):
        torch.manual_seed(seed)
        _, (found, orders) = run(torch.zeros(4, 3), x)
        first_orders.append(orders[0].tolist())
        assert [order.sort().values.tolist() for order in orders] == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2]]
        assert_same(clone(found), rows(x, list(orders)))
    assert len({tuple(order) for order in first_orders}) > 1, first_orders


@pytest.mark.inductor
def test_a_permutation_of_more_rows_than_there_are_is_an_error() -> None:
    def step(state: Tensor, x: Tensor) -> Any:
        return state + x[torch.randperm(5)].sum(), ()

    state = torch.zeros(())
    with pytest.raises((RuntimeError, IndexError)):
        jit(step)(state, torch.ones(4, 3))
    assert state == 0
