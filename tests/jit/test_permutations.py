"""The claim: rows taken by a new permutation, as in mixup, are those that the eager step takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from funcamp import jit
from funcamp._jit.passes.permutations import index_without_check
from tests.support.helpers import assert_same, clone


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


def test_a_row_of_a_tensor_without_dimensions() -> None:
    def select(x: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, rows)

    traced = make_fx(select, tracing_mode="fake")(torch.ones(()), torch.zeros(1, dtype=torch.int64))
    index_without_check(traced.graph)
    traced.recompile()
    assert_same(traced(torch.full((), 3.0), torch.zeros(1, dtype=torch.int64)), torch.full((), 3.0))
