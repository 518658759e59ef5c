"""Which parameter's gradient is not finite: by the core function and by the step, eager, compiled and vmapped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp import (
    MetricReader,
    ScalerConfig,
    found_inf_by_leaf,
    init,
    jit,
    leaf_names,
    make_train_step,
    module_loss,
    ravel,
    stateless,
    unscale_and_check,
)
from tests.conftest import Transform
from tests.support.models import mlp

NAN, INF = float("nan"), float("inf")


@pytest.mark.compiled
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_every_leaf_has_its_flag(transform: Transform, bad: float) -> None:
    grads = {"a": torch.ones(3), "b": {"c": torch.tensor([1.0, bad]), "d": torch.zeros(0)}, "e": torch.tensor(bad)}
    assert leaf_names(grads) == ("a", "b.c", "b.d", "e")
    assert transform(found_inf_by_leaf)(grads).tolist() == [False, True, False, True]


def test_flat_empty_and_complex_trees_have_their_flags_and_others_are_refused() -> None:
    flat = ravel({"w": torch.full((2, 2), INF), "b": torch.ones(2), "half": torch.ones(3).half()})
    assert dict(zip(leaf_names(flat), found_inf_by_leaf(flat).tolist())) == {"w": True, "b": False, "half": False}
    assert found_inf_by_leaf({"a": None, "b": torch.tensor([complex(0, NAN)])}).tolist() == [True]
    assert leaf_names({"a": None, "b": torch.ones(1)}) == ("b",)
    assert (found_inf_by_leaf({}).tolist(), leaf_names({})) == ([], ())
    with pytest.raises(TypeError, match=r"found_inf_by_leaf: grads\['a'\]"):
        found_inf_by_leaf({"a": 1.0})
    with pytest.raises(TypeError, match=r"leaf_names: tree\['a'\]"):
        leaf_names({"a": 1.0})


def test_gradient_that_overflows_by_unscaling_has_its_flag() -> None:
    grads, state = unscale_and_check(init(ScalerConfig(2.0**-20)), {"a": torch.tensor(1e38), "b": torch.tensor(1.0)})
    assert state.found_inf == 1
    assert found_inf_by_leaf(grads).tolist() == [True, False]


@pytest.mark.compiled
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_step_names_the_parameter_that_overflowed(flat: bool, compiled: bool) -> None:
    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return (p["quiet"] * x).sum() + (p["loud"] * x * torch.where(x.sum() > 8, 1e38, 1.0)).sum()

    config = ScalerConfig(2.0**10)
    observe = {"found_inf_by_leaf": found_inf_by_leaf}
    step = make_train_step(loss, stateless(torch.optim.SGD), config, max_norm=1.0, observe=observe)
    run: Any = jit(step, backend="eager") if compiled else step
    state = step.init({"quiet": torch.ones(4, 4), "loud": torch.ones(4)}, flat=flat)
    reader, found = MetricReader(), []
    for value in (1.0, 3.0, 1.0):
        state, metrics = run(state, torch.full((4,), value))
        reader.put(metrics)
        names = leaf_names(state.params)
        for row in reader.ready():
            found.append([name for name, flag in zip(names, row.observed["found_inf_by_leaf"].tolist()) if flag])
            assert bool(found[-1]) == bool(row.found_inf)
    assert found == [[], ["loud"], []]


def test_names_are_the_modules_own() -> None:
    task = mlp()
    step = make_train_step(module_loss(task.model, task.criterion), stateless(torch.optim.SGD))
    state = step.init()
    assert set(leaf_names(state.params)) == {name for name, _ in task.model.named_parameters()}
    assert step(state, task.batch(0))[1].observed == {}


def test_names_of_a_batch_of_states() -> None:
    step = make_train_step(lambda p, x: (p["w"] * p["b"] * x).sum(), stateless(torch.optim.SGD))
    members = torch.func.vmap(step.init)({"w": torch.ones(3, 2, 2), "b": torch.ones(3, 2)})
    assert leaf_names(members.params) == ("w", "b")
