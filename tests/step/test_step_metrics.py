"""The learning rate in the metrics, and metrics as a dict."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from funcamp import (
    MetricReader,
    Params,
    ScalerConfig,
    by_group,
    found_inf_by_leaf,
    jit,
    loss,
    make_train_step,
    stateless,
)
from funcamp.rules import Outcome, Rule
from tests.support.helpers import assert_same, to

PARAMS = {"w": torch.ones(2, 2), "b": torch.ones(2)}


def loss_fn(params: Any, batch: Tensor) -> Tensor:
    loss: Tensor = (params["w"] * batch).sum() + params["b"].sum()
    return loss


def schedule(applied: Tensor) -> Tensor:
    return 0.5 / (1 + applied)


RATE = torch.tensor(0.25)


class Plain:
    """An optimizer of one's own."""

    def init(self, params: Any) -> Any:
        return ()

    def update(self, params: Any, grads: Any, state: Any) -> Any:
        return params, state


class Rated(Plain):
    def learning_rate(self, state: Any) -> Tensor:
        return torch.tensor(2.0)


OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "number": (stateless(torch.optim.SGD, lr=0.1), 0.1),
    "default": (stateless(torch.optim.AdamW), 1e-3),
    "tensor": (stateless(torch.optim.AdamW, lr=RATE), 0.25),
    "schedule": (stateless(torch.optim.SGD, lr=schedule), 0.5),
    "schedule of numbers": (stateless(torch.optim.SGD, lr=lambda applied: 0.5), 0.5),
    "float64": (stateless(torch.optim.SGD, lr=RATE.double()), 0.25),
    "Adafactor": (stateless(torch.optim.Adafactor, lr=0.02), 0.02),
    "none": (Plain(), ()),
    "of one's own": (Rated(), 2.0),
    "groups": (
        by_group({"matrix": stateless(torch.optim.Muon, lr=0.02), "vector": stateless(torch.optim.SGD, lr=schedule)}),
        {"matrix": 0.02, "vector": 0.5},
    ),
    "a group without": (
        by_group({"matrix": Plain(), "vector": stateless(torch.optim.SGD, lr=0.1)}),
        {"vector": 0.1},
    ),
}


def rates(expected: Any) -> Any:
    if isinstance(expected, dict):
        return {label: torch.tensor(rate) for label, rate in expected.items()}
    return torch.tensor(expected) if isinstance(expected, float) else expected


@pytest.mark.thorough(keep=2)
@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("flat", [True, False])
def test_the_rate_of_a_step(name: str, flat: bool) -> None:
    optimizer, expected = OPTIMIZERS[name]
    step = make_train_step(loss_fn, optimizer, ScalerConfig(8.0))
    state = step.init(PARAMS, flat=flat)
    _, metrics = step(state, torch.ones(2, 2))
    assert_same(metrics.lr, rates(expected))
    graph = make_fx(lambda state, batch: step(state, batch))(state, torch.ones(2, 2))
    assert not [node for node in graph.graph.nodes if "_local_scalar_dense" in str(node.target)]


@pytest.mark.compiled
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_a_schedule_moves_with_applied_steps(compiled: bool) -> None:
    step = make_train_step(loss_fn, stateless(torch.optim.SGD, lr=schedule), ScalerConfig(8.0))
    run, state, seen = jit(step, backend="eager") if compiled else step, step.init(PARAMS), []
    for factor in (1.0, torch.inf, 1.0, 1.0):
        state, metrics = run(state, torch.full((2, 2), factor))
        seen.append(metrics)
    assert [round(float(metrics.lr), 6) for metrics in seen] == [0.5, 0.25, 0.25, round(0.5 / 3, 6)]


@pytest.mark.compiled
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_the_rate_is_a_copy(compiled: bool) -> None:
    rate = torch.tensor(0.25)
    step = make_train_step(loss_fn, stateless(torch.optim.SGD, lr=rate), ScalerConfig(8.0))
    run, state = jit(step, backend="eager") if compiled else step, step.init(PARAMS)
    state, first = run(state, torch.ones(2, 2))
    rate.fill_(0.125)
    _, second = run(state, torch.ones(2, 2))
    assert (first.lr.item(), second.lr.item()) == (0.25, 0.125)


def test_the_rate_on_another_device_and_under_vmap() -> None:
    step = make_train_step(loss_fn, OPTIMIZERS["groups"][0])
    _, metrics = step(to(step.init(PARAMS), "meta"), torch.ones(2, 2, device="meta"))
    assert {rate.device.type for rate in metrics.lr.values()} == {"meta"}
    step = make_train_step(loss_fn, OPTIMIZERS["schedule"][0])
    state = torch.func.vmap(step.init)({name: torch.stack([value] * 3) for name, value in PARAMS.items()})
    _, metrics = torch.func.vmap(step, in_dims=(0, None))(state, torch.ones(2, 2))
    assert metrics.lr.tolist() == [0.5] * 3


def test_metrics_as_a_dict() -> None:
    def with_aux(params: Any, batch: Tensor) -> Any:
        value = loss_fn(params, batch)
        return value, {"hits": value + 1, "deep": {"er": value + 2}}

    usual = ["loss", "grad_norm", "scale", "found_inf", "exhausted", "saturated", "applied", "skipped"]
    optimizer = OPTIMIZERS["groups"][0]
    step = make_train_step(
        loss(with_aux, has_aux=True), optimizer, observe={"found_inf_by_leaf": found_inf_by_leaf, "own": lambda g: g}
    )
    _, metrics = step(step.init(PARAMS), torch.ones(2, 2))
    row = metrics.to_dict()
    more = ["lr/matrix", "lr/vector", "consecutive_skips", "aux/hits", "aux/deep/er"]
    observed = ["observed/found_inf_by_leaf", "observed/own/w", "observed/own/b"]
    assert set(row) == {*usual, *more, *observed}
    assert row["aux/hits"] == 7
    reader = MetricReader()
    reader.put(metrics)
    (numbers,) = reader.ready()
    assert numbers.to_dict()["lr/vector"] == 0.5
    bare = make_train_step(loss_fn, Plain())
    assert set(bare(bare.init(PARAMS), torch.ones(2, 2))[1].to_dict()) == {*usual, "consecutive_skips"}
    assert all(isinstance(value, Tensor) for value in row.values())


def test_a_parameter_by_its_name() -> None:
    step = make_train_step(loss_fn, stateless(torch.optim.AdamW))
    state = step.init(PARAMS)
    assert isinstance(state.params, Params)
    assert_same(state.params["w"], PARAMS["w"])
    assert_same(state.opt_state.state["exp_avg"]["b"], torch.zeros(2))
    listed = step.init([PARAMS["w"], {"b": PARAMS["b"]}]).params
    assert_same(listed[1]["b"], PARAMS["b"])
    with pytest.raises(IndexError, match=r"2 must be in .tree\(\), a list of a torch.float32 tensor"):
        listed[2]


def test_norm_and_flag_are_of_all_parts_of_a_large_gradient() -> None:
    """An eager step on a CPU reads it part by part: of 64 rows of 2,048 elements, of fewer rows, and a rest."""
    rows, size = 64 * 2048, 2 * 64 * 2048 + 3 * 2048 + 7
    step = make_train_step(lambda p, x: (p["w"] * x).sum(), stateless(torch.optim.SGD, lr=0.1), ScalerConfig(4.0))
    state = step.init({"w": torch.zeros(size)})
    x = torch.randn(size, generator=torch.Generator().manual_seed(0))
    _, metrics = step(state, x)
    torch.testing.assert_close(metrics.grad_norm.double(), x.double().norm(), rtol=1e-6, atol=0)
    for place in (0, rows, 2 * rows, size - 1):
        _, metrics = step(state, x.index_fill(0, torch.tensor(place), math.inf))
        assert metrics.found_inf == 1


def test_a_step_evaluates_the_rule_of_its_scale_once() -> None:
    calls: list[str] = []

    class Counted(Rule):
        def outcome(self, state: Any, config: Any) -> Outcome:
            calls.append("outcome")
            return Outcome(
                state.scale, state.growth_tracker, backs_off=state.found_inf != 0, grows=state.found_inf == 0
            )

    config = ScalerConfig(rule=Counted())
    step = make_train_step(loss_fn, stateless(torch.optim.SGD, lr=0.1), config)
    state = step.init(PARAMS)
    calls.clear()  # of the check of a new rule
    step(state, torch.ones(2, 2))
    assert calls == ["outcome"]
