"""A training step under vmap: members do not touch each other, and what vmap rounds in another place than the loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import stack_module_state, vmap
from torch.utils import _pytree

import funcamp
from tests.recipes import example, oracle, trace_of
from tests.support.helpers import assert_same, clone
from tests.support.models import with_two_roundings

RECIPE = example("ensemble")


pytestmark = pytest.mark.usefixtures("one_thread")


def test_difference_to_the_loop_is_where_vmap_adds_the_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    params, history = RECIPE.train(40, lambda step: step)
    monkeypatch.setattr(RECIPE, "make_model", with_two_roundings(RECIPE.make_model))
    expected, trace = oracle("ensemble").oracle(RECIPE, 40, "cpu")
    assert trace_of(history) == trace
    assert_same(params, expected)


class Float32(nn.Module):
    """A layer that is given float32."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x.float())


def make_model(seed: int, layer: nn.Module | None = None, bias: bool = True) -> nn.Module:
    torch.manual_seed(seed)
    layers = [] if layer is None else [layer]
    return nn.Sequential(nn.Linear(8, 32, bias), *layers, nn.Tanh(), nn.Linear(32, 1, bias))


def members(models: list[nn.Module], **options: Any) -> tuple[Any, Any]:
    """A step and a batch of its states."""
    adamw = funcamp.stateless(torch.optim.AdamW, lr=1e-2)
    config = funcamp.ScalerConfig(init_scale=2.0**14, growth_interval=3)
    loss_fn = funcamp.module_loss(models[0], RECIPE.criterion)
    step = funcamp.make_train_step(loss_fn, adamw, config, policy="float16", **options)
    detached = _pytree.tree_map(Tensor.detach, stack_module_state(models))
    return step, vmap(step.init)(*detached)


def data(index: int, sizes: list[float]) -> tuple[Tensor, Tensor]:
    """A batch for each member, of a magnitude of its own."""
    pairs = [RECIPE.batch(100 * index + member, "cpu") for member in range(len(sizes))]
    x, y = (torch.stack(column) for column in zip(*pairs))
    return x * torch.tensor(sizes)[:, None, None], y


@pytest.mark.compiled
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_member_that_overflows_is_left_as_it_was_and_the_others_do_not_notice(compiled: bool) -> None:
    step, state = members([make_model(seed) for seed in range(3)], max_norm=1.0, ema_decay=0.9)
    before, other = clone(state), clone(state)
    run = funcamp.jit(vmap(step), backend="eager") if compiled else vmap(step)
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


def test_members_are_what_each_is_alone() -> None:
    models = [make_model(seed, bias=False) for seed in range(3)]
    step, state = members(models, max_norm=1.0)
    alone = [step.init({name: value.detach() for name, value in model.named_parameters()}) for model in models]
    sizes = [1.0, 100.0, 1.0]
    for index in range(20):
        state, metrics = vmap(step)(state, data(index, sizes))
        for member, (x, y) in enumerate(zip(*data(index, sizes))):
            alone[member], expected = step(alone[member], (x, y))
            assert metrics.scale[member] == expected.scale
            assert metrics.found_inf[member] == expected.found_inf
    assert state.skipped[1] > state.skipped[0]
    trees = vmap(lambda member: member.params.tree())(state)
    for member, expected in enumerate(alone):
        assert_same({name: value[member] for name, value in trees.items()}, expected.params.tree())


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.BatchNorm1d])
def test_torch_wants_norms_in_float32_under_vmap_on_a_cpu(kind: Any) -> None:
    batch = data(0, [1.0, 1.0])
    step, state = members([make_model(seed, kind(32)) for seed in range(2)])
    with pytest.raises(RuntimeError, match="expected scalar type Half but found Float"):
        vmap(step)(state, batch)
    step, state = members([make_model(seed, Float32(kind(32))) for seed in range(2)])
    after, metrics = vmap(step)(state, batch)
    assert metrics.found_inf.tolist() == [0.0, 0.0]
    for name, value in after.buffers.items():
        assert not torch.equal(value, state.buffers[name])


def test_dropout_wants_a_word_about_randomness() -> None:
    step, state = members([make_model(seed, nn.Dropout(0.5)) for seed in range(2)])
    x, y = RECIPE.batch(0, "cpu")
    state = _pytree.tree_map(lambda leaf: leaf[[0, 0]], state)
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(step, in_dims=(0, None))(state, (x, y))
    _, metrics = vmap(step, in_dims=(0, None), randomness="different")(state, (x, y))
    assert metrics.loss[0] != metrics.loss[1]
    _, metrics = vmap(step, in_dims=(0, None), randomness="same")(state, (x, y))
    assert metrics.loss[0] == metrics.loss[1]
