"""One warning after 20 skipped steps in a row, of a scaler that reads the flag and of a reader of metrics."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import funcamp
from funcamp import GradScaler, MetricReader, ScalerConfig, make_train_step, stateless
from funcamp._amp.skips_in_a_row import LIMIT
from tests.support.helpers import assert_silent


def weights() -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.ones(2)) for name in ("fine", "bad")}


def take_steps(scaler: Any, optimizers: Any, named: Any, count: int, *, factor: float = torch.inf) -> None:
    for _ in range(count):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(named["fine"].sum() + factor * named["bad"][0]).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update(8.0)  # whatever the rule


def test_scaler_warns_once_and_names_the_parameter() -> None:
    named = weights()
    scaler = pickle.loads(pickle.dumps(GradScaler("cpu", init_scale=8.0)))
    sgd = torch.optim.SGD(named.items(), lr=0.1)
    take_steps(scaler, [sgd], named, LIMIT - 1)
    take_steps(scaler, [sgd], named, 1, factor=1.0)
    take_steps(scaler, [sgd], named, LIMIT - 1)
    with pytest.warns(UserWarning, match="GradScaler.step: 20 steps in a row were skipped.* not finite is bad") as seen:
        take_steps(scaler, [sgd], named, 1)
    assert seen[0].filename == __file__
    with assert_silent():
        take_steps(scaler, [sgd], named, 2 * LIMIT)


def test_scaler_counts_each_optimizer_and_names_one_without_names_by_its_place() -> None:
    named = weights()
    scaler = GradScaler("cpu", init_scale=8.0)
    optimizers = [torch.optim.SGD([value], lr=0.1) for value in named.values()]
    take_steps(scaler, optimizers, named, LIMIT - 1)
    with pytest.warns(UserWarning, match=r"number 0 of group 0, shape \(2,\)"):
        take_steps(scaler, optimizers, named, 1)


@pytest.mark.parametrize("observes", [False, True])
def test_reader_warns_once_and_names_the_leaf_if_it_is_observed(observes: bool) -> None:
    step = make_train_step(
        lambda p, x: p["fine"].sum() + x * p["bad"].sum(),
        stateless(torch.optim.SGD, lr=0.1),
        ScalerConfig(init_scale=8.0),
        observe={"bad": funcamp.found_inf_by_leaf} if observes else {},
    )
    state = step.init({"bad": torch.ones(2), "fine": torch.ones(2)})
    reader = MetricReader()

    def run(count: int) -> None:
        nonlocal state
        for _ in range(count):
            state, metrics = step(state, torch.tensor(torch.inf))
            reader.put(metrics if observes else metrics.to_dict())
        reader.ready()

    run(LIMIT - 1)
    expected = r"observed\['bad'\] flags leaf 0 first" if observes else "the loss is inf, and a gradient is inf or NaN"
    with pytest.warns(UserWarning, match=f"MetricReader: 20 steps in a row were skipped.*{expected}") as seen:
        run(1)
    assert seen[0].filename == __file__
    with assert_silent():
        run(LIMIT)
