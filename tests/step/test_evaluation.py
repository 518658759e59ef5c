"""`step.loss` is an evaluation, of one return type, that leaves the module as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcamp import jit, loss, make_train_step, module_loss, numerics, presets, stateless
from tests.support.helpers import assert_same, clone, values_of

SGD = stateless(torch.optim.SGD, lr=0.1)


class Merges(nn.Linear):
    """As adapters do: `train` writes the weight."""

    def train(self, mode: bool = True) -> Merges:
        self.weight.data += 1
        return super().train(mode)


def network() -> nn.Module:
    torch.manual_seed(0)
    frozen = nn.BatchNorm1d(8).eval()
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), frozen, nn.Dropout(0.5), Merges(8, 2))


def flags(model: nn.Module) -> list[bool]:
    return [part.training for part in model.modules()]


def evaluators(step: Any) -> dict[str, Callable[[Any, Any], Tensor]]:
    return {
        "eager": step.loss,
        "jit": lambda state, batch: jit(lambda s, b: (s, step.loss(s, b)), backend="eager")(clone(state), batch)[1],
        "compiled": torch.compile(lambda s, b: step.loss(s, b), fullgraph=True, backend="aot_eager"),
    }


@pytest.mark.compiled
@pytest.mark.parametrize("how", ["eager", "jit", "compiled"])
@pytest.mark.parametrize("policy", [None, "bfloat16"])
def test_the_loss_is_that_of_the_module_in_eval_mode(policy: Any, how: str) -> None:
    model = network()
    before, state_before = flags(model), clone(values_of(model))
    loss_fn = module_loss(model, F.mse_loss)
    step = make_train_step(loss_fn, SGD, presets.disabled(), policy=policy)
    x, y = torch.randn(6, 4), torch.randn(6, 2)
    eager = copy.deepcopy(model)
    state, _ = step(step.init(), (x, y))
    eager.load_state_dict(loss_fn.state_dict(state.params, state.buffers))
    for part in eager.modules():
        part.training = False
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=policy is not None):
        expected = F.mse_loss(eager(x), y)
    found = evaluators(step)[how](state, (x, y))
    assert_same(found, expected)
    assert not found.requires_grad
    assert flags(model) == before
    assert_same(clone(values_of(model)), state_before)
    rng = torch.get_rng_state()
    step.loss(state, (x, y))
    assert_same(torch.get_rng_state(), rng)


def test_training_leaves_the_flags() -> None:
    model, batch = network(), (torch.randn(6, 4), torch.randn(6, 2))
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    state = step.init()
    torch.manual_seed(1)
    expected = step(state, batch)[1].loss
    torch.manual_seed(1)
    assert_same(step.loss(state, batch, training=True), expected)
    for part in model.modules():
        part.training = False
    assert_same(step.loss(state, batch, training=True), step.loss(state, batch))


def test_the_flags_are_put_back_after_an_error() -> None:
    model = network()
    before = flags(model)
    step = make_train_step(module_loss(model, F.mse_loss), SGD)
    with pytest.raises(RuntimeError):
        step.loss(step.init(), (torch.ones(3, 5), torch.ones(3, 2)))
    assert flags(model) == before


def test_a_tracked_loss_is_evaluated_too() -> None:
    model, batch = network(), (torch.randn(6, 4), torch.randn(6, 2))
    loss_fn = module_loss(model, F.mse_loss)
    steps = [make_train_step(loss, SGD) for loss in (loss_fn, numerics.track_scales(loss_fn))]
    state = steps[0].init()
    assert_same(steps[1].loss(state, batch), steps[0].loss(state, batch))
    assert flags(model) == flags(network())


@pytest.mark.parametrize("has_buffers", [False, True])
@pytest.mark.parametrize("has_aux", [False, True])
def test_a_step_returns_the_loss_alone_with_and_without_buffers_and_aux(has_buffers: bool, has_aux: bool) -> None:
    def loss_fn(params: Any, *rest: Any) -> Any:
        value = (params["w"] * rest[-1]).sum()
        if not has_buffers and not has_aux:
            return value
        beside = ({"b": torch.ones(1)}, {"hits": value}) if has_buffers and has_aux else {"b": torch.ones(1)}
        return value, beside

    step = make_train_step(loss(loss_fn, has_aux=has_aux, has_buffers=has_buffers), SGD)
    state = step.init({"w": torch.ones(2)}, {"b": torch.zeros(1)} if has_buffers else None)
    assert_same(step.loss(state, torch.ones(2)), torch.tensor(2.0))
