"""Options of a step: the scaler in the loss, and the parameters as the loss sees them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from funcamp import (
    ScalerConfig,
    ScalerState,
    init,
    jit,
    loss,
    make_train_step,
    module_loss,
    presets,
    scale,
    scaled_grad_and_value,
    stateless,
    unscale,
)
from tests.support.helpers import assert_same, clone
from tests.support.models import cnn, mlp, tied

SGD = stateless(torch.optim.SGD, lr=0.5)
CONFIG = ScalerConfig(2.0**10)


def plain(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (params["w"] * x).square().sum()


def with_scaler(params: dict[str, Tensor], scaler: ScalerState, x: Tensor) -> Any:
    # times the scale, and back: only the right state gives the same loss
    return unscale(scaler, scale(scaler, plain(params, x))) * (scaler.scale / 2.0**10)


@pytest.mark.thorough(keep=1)
@pytest.mark.compiled
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_has_scaler_passes_the_state_that_scales(accumulate: int, compiled: bool) -> None:
    params = {"w": torch.tensor([1.0, 2.0, 3.0])}
    x = torch.ones(2, 3) if accumulate > 1 else torch.ones(3)
    results = []
    for function, has_scaler in ((plain, False), (with_scaler, True)):
        step: Any = make_train_step(loss(function, has_scaler=has_scaler), SGD, CONFIG, accumulate=accumulate)
        state = step.init(params)
        assert step.loss(state, x if accumulate == 1 else x[0]) == 14.0
        results.append((jit(step, backend="eager") if compiled else step)(state, x))
    assert_same(results[1], results[0])


def test_has_scaler_comes_after_buffers() -> None:
    seen = []

    def function(params: Any, buffers: Any, scaler: Any, batch: Any) -> Any:
        seen.append((set(params), set(buffers), type(scaler), batch.shape))
        return plain(params, batch) * buffers["b"], buffers

    step = make_train_step(loss(function, has_scaler=True, has_buffers=True), SGD, CONFIG)
    step(step.init({"w": torch.ones(3)}, {"b": torch.ones(())}), torch.ones(3))
    assert seen == [({"w"}, {"b"}, ScalerState, (3,))]


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("policy", [None, "float16"])
@pytest.mark.parametrize("make", [cnn, tied])
def test_compute_params_are_what_the_loss_sees(make: Any, policy: Any, flat: bool) -> None:
    task = make()
    inner = module_loss(task.model, task.criterion)
    seen = []

    class See(type(inner)):  # type: ignore[misc]  # ModuleLoss
        def __call__(self, params: Any, *rest: Any) -> Any:
            seen.append(params)
            return super().__call__(params, *rest)

    step = make_train_step(See(task.model, task.criterion), SGD, CONFIG, policy=policy)
    state = step.init(flat=flat)
    found = step.compute_params(state)
    step.loss(state, task.batch(0))
    assert_same(clone(found), clone(seen[0]))
    assert {leaf.dtype for leaf in found.values()} == {torch.float32}
    assert not any(leaf.requires_grad for leaf in found.values())


@pytest.mark.parametrize("flat", [True, False])
def test_nothing_of_the_first_state_requires_grad(flat: bool) -> None:
    task = mlp()
    step = make_train_step(module_loss(task.model, task.criterion), SGD, CONFIG, policy="float16")
    params = dict(task.model.named_parameters())
    stacked = {name: torch.stack([value, value]) for name, value in params.items()}
    state, members = step.init(params, flat=flat), torch.func.vmap(lambda p: step.init(p, flat=flat))(stacked)
    _, metrics = step(state, task.batch(0))
    assert not any(leaf.requires_grad for leaf in _pytree.tree_leaves((state, members, metrics)))


def test_engine_of_a_function_made_inside_the_step() -> None:
    def step(state: Any, x: Tensor) -> Any:
        return scaled_grad_and_value(plain, engine="autograd")(state[1], state[0], x)

    (grads, _), loss = jit(step, backend="eager")(({"w": torch.ones(2)}, init()), torch.ones(2))
    assert (grads["w"].tolist(), loss.item()) == ([2.0, 2.0], 2.0)


def test_tree_of_a_batch_of_states_is_taken_under_vmap() -> None:
    step = make_train_step(plain, SGD, CONFIG)
    members = torch.func.vmap(step.init)({"w": torch.ones(3, 2)})
    with pytest.raises(ValueError, match=r"no batch dimension; got \(3, \d+\): take the tree under vmap"):
        members.params.tree()
    assert torch.func.vmap(lambda params: params.tree())(members.params)["w"].shape == (3, 2)


def test_compute_params_stay_what_they_were() -> None:
    for policy in (None, "bfloat16"):
        step = make_train_step(lambda p, x: (p["w"] * x).sum(), SGD, CONFIG, policy=policy)
        run, state = jit(step, backend="eager"), step.init({"w": torch.ones(2, 2)})
        old = step.compute_params(state)
        state, _ = run(state, torch.ones(2, 2))
        assert_same(old["w"].float(), torch.ones(2, 2))
        assert_same(step.compute_params(state)["w"].float(), torch.full((2, 2), 0.5))


def test_a_loss_that_is_described_already_is_not_described_again() -> None:
    for made in (module_loss(mlp().model, mlp().criterion), loss(with_scaler, has_scaler=True)):
        with pytest.raises(TypeError, match=r"loss: function must not be a loss already: .* got (module_)?loss\("):
            loss(made, has_scaler=True)


def test_a_loss_is_the_function_it_was_made_of() -> None:
    assert make_train_step(plain, SGD).loss_fn.function is plain
    described = loss(plain, engine="func")
    assert make_train_step(described, SGD).loss_fn is described
    params, x = {"w": torch.tensor([1.0, 2.0])}, torch.ones(2)
    assert_same(described(params, x), plain(params, x))


@pytest.mark.parametrize(
    ("config", "policy", "lines"),
    [
        (None, None, 1),
        (None, "bfloat16", 1),
        (ScalerConfig(), "float32", 1),
        (None, "float16", 0),
        (presets.disabled(), None, 0),
        (ScalerConfig(2.0**10), None, 0),
    ],
    ids=["default", "bfloat16", "float32", "float16", "disabled", "other"],
)
def test_a_scale_that_float16_does_not_need_is_logged(
    caplog: pytest.LogCaptureFixture, config: ScalerConfig | None, policy: str | None, lines: int
) -> None:
    given: dict[str, Any] = {} if config is None else {"config": config}
    with caplog.at_level("INFO", "funcamp"):
        step = make_train_step(plain, SGD, policy=policy, **given)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == lines
    assert all("from 65536 on" in text and "config=funcamp.presets.disabled()" in text for text in texts)
    assert step.init({"w": torch.ones(2)}).scaler.scale == (config or ScalerConfig()).init_scale  # as torch's
