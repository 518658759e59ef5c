"""`observe`: what functions of the gradients return is in the metrics, in the parameters' own tree, before clipping."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from funcamp import (
    ScalerConfig,
    found_inf_by_leaf,
    init,
    jit,
    leaf_names,
    make_train_step,
    module_loss,
    scaled_grad_and_value,
    stateless,
)
from tests.support.helpers import assert_same, clone
from tests.support.models import cnn, mlp, tied

pytestmark = pytest.mark.compiled

SGD = stateless(torch.optim.SGD, lr=0.1, momentum=0.9)
CONFIG = ScalerConfig(2.0**8)
WRAPPED = pytest.mark.parametrize("wrapped", [False, True], ids=["eager", "jit"])
FLAT = pytest.mark.parametrize("flat", [True, False])


def norm_by_leaf(grads: Any) -> Any:
    return _pytree.tree_map_only(Tensor, lambda grad: grad.norm(), grads)


def extremes(grads: Any) -> tuple[Tensor, Tensor]:
    leaves = [leaf for leaf in _pytree.tree_leaves(grads) if leaf is not None]
    return torch.stack([leaf.min() for leaf in leaves]).min(), torch.stack([leaf.max() for leaf in leaves]).max()


OBSERVE: dict[str, Any] = {
    "norm": norm_by_leaf,
    "found_inf_by_leaf": found_inf_by_leaf,
    "extremes": extremes,
    "grads": lambda grads: grads,
}


@pytest.mark.thorough(keep=2)
@WRAPPED
@FLAT
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("make", [mlp, tied])
def test_observed_is_what_the_functions_say_of_the_gradients(
    make: Any, accumulate: int, flat: bool, wrapped: bool
) -> None:
    task = make()
    loss_fn = module_loss(task.model, task.criterion)
    grads_of = scaled_grad_and_value(lambda params, piece: loss_fn(params, piece) / accumulate)
    step = make_train_step(loss_fn, SGD, CONFIG, max_norm=1e-2, accumulate=accumulate, observe=OBSERVE)
    run: Any = jit(step, backend="eager") if wrapped else step
    state, names = step.init(flat=flat), leaf_names(step.init(flat=flat).params)
    for number in range(3):
        pieces = [task.batch(2 * number + part) for part in range(accumulate)]
        params = clone(state.params.tree())
        of_pieces = [grads_of(init(CONFIG), params, piece)[0][0] for piece in pieces]
        grads = _pytree.tree_map(lambda *parts: sum(parts[1:], parts[0]), *of_pieces)
        batch = tuple(torch.stack(column) for column in zip(*pieces)) if accumulate > 1 else pieces[0]
        state, metrics = run(state, batch)
        assert_same(metrics.observed, {name: function(grads) for name, function in OBSERVE.items()})
        assert metrics.observed["found_inf_by_leaf"].shape == (len(names),)
        assert metrics.grad_norm > 0.1  # which max_norm clips


@WRAPPED
@FLAT
def test_observed_of_a_step_that_is_skipped(flat: bool, wrapped: bool) -> None:
    def function(params: Any, x: Tensor) -> Tensor:
        total: Tensor = (params["loud"] * x).sum() + params["quiet"].sum()
        return total

    step = make_train_step(function, SGD, CONFIG, observe=OBSERVE)
    run: Any = jit(step, backend="eager") if wrapped else step
    state, metrics = run(
        step.init({"quiet": torch.ones(2, 2), "loud": torch.ones(2)}, flat=flat), torch.tensor([1.0, math.inf])
    )
    assert metrics.found_inf == 1
    assert dict(zip(leaf_names(state.params), metrics.observed["found_inf_by_leaf"].tolist())) == {
        "quiet": False,
        "loud": True,
    }
    assert metrics.observed["norm"] == {"quiet": 2.0, "loud": math.inf}
    assert metrics.observed["grads"]["loud"].tolist() == [1.0, math.inf]


@WRAPPED
@FLAT
def test_functions_see_the_tree_that_init_was_given(flat: bool, wrapped: bool) -> None:
    params = [(torch.ones(2, 3), None), {"b": torch.ones(3)}, torch.ones((), dtype=torch.float64)]

    def function(p: Any, x: Tensor) -> Tensor:
        total: Tensor = (x @ p[0][0] * p[1]["b"]).sum() * p[2].float()
        return total

    def parts(grads: Any) -> Any:
        (first, nothing), second, third = grads
        assert nothing is None
        return {"first": first, "second": second, "third": third}

    step = make_train_step(function, SGD, CONFIG, observe={"parts": parts})
    run: Any = jit(step, backend="eager") if wrapped else step
    _, metrics = run(step.init(params, flat=flat), torch.ones(1, 2))
    third = torch.tensor(6.0, dtype=torch.float64)
    expected = {"first": torch.ones(2, 3), "second": {"b": torch.full((3,), 2.0)}, "third": third}
    assert_same(metrics.observed["parts"], expected)


@pytest.mark.thorough(keep=1)
@WRAPPED
@FLAT
def test_observed_is_no_part_of_the_state_and_changes_nothing(flat: bool, wrapped: bool) -> None:
    task, ends = cnn(), []
    for observe in (None, {**OBSERVE, "constant": lambda grads: grads["6.bias"].new_zeros(2)}):
        step = make_train_step(module_loss(task.model, task.criterion), SGD, CONFIG, observe=observe)
        run: Any = jit(step, backend="eager") if wrapped else step
        state = step.init(flat=flat)
        for number in range(3):
            state, metrics = run(state, task.batch(number))
            for leaf in _pytree.tree_leaves(metrics.observed):
                leaf.zero_()
        ends.append((clone(state), metrics._replace(observed={})))
    assert_same(ends[1], ends[0])
