"""Metrics: the learning rate, what functions of the gradients return (`observe`), and all of them as a dict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import MetricReader, ScalerConfig, by_group, found_inf_by_leaf, loss, make_train_step, stateless
from tests.support.helpers import assert_same, clone
from tests.support.steps import eager_and_traced

PARAMS = {"w": torch.ones(2, 2), "b": torch.ones(2)}


def loss_fn(params: Any, batch: Tensor) -> Tensor:
    loss: Tensor = (params["w"] * batch).sum() + params["b"].sum()
    return loss


def schedule(applied: Tensor) -> Tensor:
    return 0.5 / (1 + applied)


class Plain:
    """An optimizer of one's own."""

    def init(self, params: Any) -> Any:
        return ()

    def update(self, params: Any, grads: Any, state: Any) -> Any:
        return params, state


class Rated(Plain):
    def learning_rate(self, state: Any) -> Tensor:
        return torch.tensor(2.0)


GROUPS = by_group({"matrix": stateless(torch.optim.Muon, lr=0.02), "vector": stateless(torch.optim.SGD, lr=schedule)})
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "default": (stateless(torch.optim.AdamW), 1e-3),
    "of one's own": (Rated(), 2.0),
    "groups": (GROUPS, {"matrix": 0.02, "vector": 0.5}),
    "a group without": (by_group({"matrix": Plain(), "vector": stateless(torch.optim.SGD, lr=0.1)}), {"vector": 0.1}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_rate_of_a_step(name: str) -> None:
    optimizer, expected = OPTIMIZERS[name]
    step = make_train_step(loss_fn, optimizer)
    _, metrics = step(step.init(PARAMS), torch.ones(2, 2))
    rates = torch.utils._pytree.tree_map(torch.tensor, expected)
    assert_same(metrics.lr, rates)


def test_a_schedule_moves_with_applied_steps_and_a_tensor_when_it_is_filled() -> None:
    rate = torch.tensor(0.25, dtype=torch.float64)
    optimizer = by_group(
        {"matrix": stateless(torch.optim.SGD, lr=schedule), "vector": stateless(torch.optim.SGD, lr=rate)}
    )
    step = make_train_step(loss_fn, optimizer, ScalerConfig(8.0))
    state, rows = step.init(PARAMS), []
    for factor in (1.0, torch.inf, 1.0, 1.0):
        state, metrics = step(state, torch.full((2, 2), factor))
        rows.append(metrics.lr)
        rate.mul_(0.5)
    assert [row["matrix"].item() for row in rows] == pytest.approx([0.5, 0.25, 0.25, 0.5 / 3])
    assert [row["vector"].item() for row in rows] == [0.25, 0.125, 0.0625, 0.03125]


# `observe`: functions of the unscaled gradients before clipping, in the tree that `init` was given.


def start() -> Any:
    return [(torch.ones(2, 3), None), {"b": torch.ones(3)}, torch.ones((), dtype=torch.float64)]


def product(p: Any, x: Tensor) -> Tensor:
    total: Tensor = (x @ p[0][0] * p[1]["b"]).sum() * p[2].float()
    return total


def parts(grads: Any) -> Any:
    (first, nothing), second, third = grads
    assert nothing is None
    return {"first": first, "second": second, "third": third, "norm": first.norm()}


@pytest.mark.compiled
@eager_and_traced
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_functions_see_the_gradients_before_clipping_in_the_tree_that_init_was_given(
    accumulate: int, flat: bool, wrap: Any
) -> None:
    options: Any = {"max_norm": 1e-2, "accumulate": accumulate, "observe": {"parts": parts}}
    step = make_train_step(product, stateless(torch.optim.SGD, momentum=0.9), ScalerConfig(2.0**8), **options)
    # The mean of micro-batches of 1 and of 3 is 2.
    batch = torch.tensor([1.0, 3.0])[:, None, None].expand(2, 1, 2) if accumulate > 1 else torch.full((1, 2), 2.0)
    state, metrics = wrap(step)(step.init(start(), flat=flat), batch.clone())
    first, third = torch.full((2, 3), 2.0), torch.tensor(12.0, dtype=torch.float64)
    expected = {"first": first, "second": {"b": torch.full((3,), 4.0)}, "third": third, "norm": first.norm()}
    assert_same(metrics.observed["parts"], expected)
    before = clone(state)
    for leaf in torch.utils._pytree.tree_leaves(metrics.observed):
        leaf.zero_()  # no part of the state
    assert_same(state, before)


def test_metrics_as_a_dict() -> None:
    def with_aux(params: Any, batch: Tensor) -> Any:
        value = loss_fn(params, batch)
        return value, {"hits": value + 1, "deep": {"er": value + 2}}

    usual = ["loss", "grad_norm", "scale", "found_inf", "exhausted", "saturated", "applied", "skipped"]
    usual.append("consecutive_skips")
    observe: Any = {"found_inf_by_leaf": found_inf_by_leaf, "own": lambda grads: grads}
    step = make_train_step(loss(with_aux, has_aux=True), GROUPS, observe=observe)
    _, metrics = step(step.init(PARAMS), torch.ones(2, 2))
    row = metrics.to_dict()
    more = ["lr/matrix", "lr/vector", "aux/hits", "aux/deep/er"]
    observed = ["observed/found_inf_by_leaf", "observed/own/w", "observed/own/b"]
    assert set(row) == {*usual, *more, *observed}
    assert row["aux/hits"] == 7
    assert all(isinstance(value, Tensor) for value in row.values())
    reader = MetricReader()
    reader.put(metrics)
    (numbers,) = reader.ready()
    assert numbers.to_dict()["lr/vector"] == 0.5
    bare = make_train_step(loss_fn, Plain())
    assert set(bare(bare.init(PARAMS), torch.ones(2, 2))[1].to_dict()) == set(usual)
