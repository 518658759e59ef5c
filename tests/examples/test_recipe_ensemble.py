"""A training step under vmap: members do not touch each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import stack_module_state, vmap
from torch.utils import _pytree

import funcamp
from tests.recipes import example
from tests.support.helpers import assert_same, clone
from tests.support.steps import eager_and_traced

RECIPE = example("ensemble")

pytestmark = pytest.mark.usefixtures("one_thread")


def members() -> tuple[Any, Any]:
    """A step and a batch of three of its states."""
    models = [RECIPE.make_model(seed) for seed in range(3)]
    adamw = funcamp.stateless(torch.optim.AdamW, lr=1e-2)
    config = funcamp.ScalerConfig(init_scale=2.0**14, growth_interval=3)
    loss_fn = funcamp.module_loss(models[0], RECIPE.criterion)
    step = funcamp.make_train_step(loss_fn, adamw, config, policy="float16", max_norm=1.0, ema_decay=0.9)
    detached = _pytree.tree_map(Tensor.detach, stack_module_state(models))
    return step, vmap(step.init)(*detached)


def data(index: int, sizes: list[float]) -> tuple[Tensor, Tensor]:
    """A batch for each member, of a magnitude of its own."""
    pairs = [RECIPE.batch(100 * index + member, "cpu") for member in range(len(sizes))]
    x, y = (torch.stack(column) for column in zip(*pairs))
    return x * torch.tensor(sizes)[:, None, None], y


@pytest.mark.compiled
@eager_and_traced
def test_member_that_overflows_is_left_as_it_was_and_the_others_do_not_notice(wrap: Any) -> None:
    step, state = members()
    before, other = clone(state), clone(state)
    run = wrap(vmap(step))
    for index in range(5):
        state, metrics = run(state, data(index, [1.0, 1e6, 1.0]))
        other, _ = vmap(step)(other, data(index, [1.0, 1.0, 1.0]))
        assert metrics.found_inf.tolist() == [0.0, 1.0, 0.0]
    for name in ("params", "opt_state", "ema"):
        got, untouched, fine = (_pytree.tree_leaves(getattr(tree, name)) for tree in (state, before, other))
        for a, b, c in zip(got, untouched, fine):
            assert_same(a[1], b[1])
            assert_same(a[[0, 2]], c[[0, 2]])
            assert not torch.equal(c[1], b[1])
    assert state.scaler.scale.tolist() == [2.0**15, 2.0**9, 2.0**15]
    assert state.consecutive_skips.tolist() == [0, 5, 0]
