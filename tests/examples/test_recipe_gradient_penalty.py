"""A gradient inside a loss: with respect to parameters or inputs, scaled and unscaled, and what goes wrong without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import funcamp
from tests.recipes import Trace, advance, example, scaler_for, trace_of, values
from tests.support.helpers import assert_close, assert_same, one_thread

CONFIG = funcamp.ScalerConfig(init_scale=2.0**24, growth_interval=10)
STEPS = 40
LR = 0.01


def make_critic() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def samples(index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Real ones, generated ones, and points between them."""
    generator = torch.Generator().manual_seed(index)
    real, fake = torch.randn(16, 6, generator=generator) + 1, torch.randn(16, 6, generator=generator) - 1
    return real, fake, torch.lerp(fake, real, torch.rand(16, 1, generator=generator))


def critic_loss(real: Tensor, fake: Tensor, slope: Tensor) -> Tensor:
    penalty: Tensor = (slope.norm(dim=1) - 1).square().mean()
    return fake.float().mean() - real.float().mean() + 10 * penalty


def wgan_gp_oracle() -> tuple[dict[str, Tensor], Trace]:
    critic = make_critic()
    optimizer = torch.optim.SGD(critic.parameters(), lr=LR)
    scaler, trace = scaler_for(CONFIG, "cpu"), []
    for index in range(STEPS):
        real, fake, between = samples(index)
        optimizer.zero_grad()
        between.requires_grad_()
        with torch.autocast("cpu", torch.float16):
            on_real, on_fake, on_between = critic(real), critic(fake), critic(between)
        (scaled_slope,) = torch.autograd.grad(scaler.scale(on_between.float().sum()), between, create_graph=True)
        loss = critic_loss(on_real, on_fake, scaled_slope * (1.0 / scaler.get_scale()))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        trace.append(advance(scaler))
    return values(critic), trace


@pytest.mark.compiled
@pytest.mark.parametrize(
    "wrap", [lambda step: step, lambda step: funcamp.jit(step, backend="eager")], ids=["eager", "compiled"]
)
def test_penalty_on_the_gradient_of_the_inputs(wrap: Callable[[Any], Any]) -> None:
    critic = make_critic()

    def loss_fn(params: Any, scaler: funcamp.ScalerState, batch: Any) -> Tensor:
        real, fake, between = batch
        on_real, on_fake = functional_call(critic, params, real), functional_call(critic, params, fake)
        score = funcamp.scaled_grad_and_value(lambda x: functional_call(critic, params, x).float().sum())
        (slope, _), _ = score(scaler, between)
        return critic_loss(on_real, on_fake, slope)

    sgd = funcamp.stateless(torch.optim.SGD, lr=LR)
    step = funcamp.make_train_step(funcamp.loss(loss_fn, has_scaler=True), sgd, CONFIG, policy="float16")
    run, state, history = wrap(step), step.init(dict(critic.named_parameters())), []
    with one_thread():
        for index in range(STEPS):
            state, metrics = run(state, samples(index))
            history.append(metrics)
        expected, trace = wgan_gp_oracle()
    assert trace_of(history) == trace
    assert 1 <= sum(found for _, found in trace) <= STEPS / 2
    # The penalty is in a transform of torch.func, in which autocast casts once more: gradients of its use and of the
    # other two are added in float32, where torch's loop with one cast adds them in float16.
    assert_close(state.params.tree(), expected, 1e-3)


def norm_at(scale: float, size: float, engine: Callable[..., Any]) -> Tensor:
    """The norm of a loss's gradient at a scale; the loss's own size is a factor."""
    recipe = example("gradient_penalty")
    model, (x, y) = recipe.make_model(), recipe.batch(0, "cpu")
    scaler = funcamp.init(funcamp.ScalerConfig(init_scale=scale))

    def loss_fn(params: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            loss: Tensor = recipe.criterion(functional_call(model, params, x), y) * size
        return loss

    params = {name: value.detach() for name, value in model.named_parameters()}
    grads = engine(loss_fn, scaler, params)
    return torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()


def scaled(loss_fn: Any, scaler: funcamp.ScalerState, params: Any) -> Any:
    return funcamp.scaled_grad_and_value(loss_fn)(scaler, params)[0][0]


def by_hand(loss_fn: Any, scaler: funcamp.ScalerState, params: Any) -> Any:
    grads = torch.func.grad(lambda params: funcamp.scale(scaler, loss_fn(params)))(params)
    return funcamp.unscale(scaler, grads)


def plain(loss_fn: Any, scaler: funcamp.ScalerState, params: Any) -> Any:
    return torch.func.grad(loss_fn)(params)


@pytest.mark.parametrize("engine", [scaled, by_hand])
def test_norm_is_float32s_whatever_the_scale(engine: Callable[..., Any]) -> None:
    expected = torch.tensor(example("gradient_penalty").float32_norm(0, "cpu"))
    for scale in (2.0**6, 2.0**12):
        assert_close(norm_at(scale, 1.0, engine), expected, 2.0**-10)


def test_inner_gradient_without_a_scale_is_flushed_to_zero() -> None:
    size = 2.0**-28
    expected = norm_at(2.0**12, 1.0, scaled) * size
    assert_close(norm_at(2.0**32, size, scaled), expected, 2.0**-10)
    assert norm_at(2.0**32, size, plain) < expected / 10


def test_inner_gradient_that_overflows_skips_the_step() -> None:
    recipe = example("gradient_penalty")
    params, history = recipe.train(3, lambda step: step)
    assert all(metrics.found_inf for metrics in history)
    assert torch.isfinite(history[0].aux[0])
    assert not torch.isfinite(history[0].aux[1])
    assert_same(params, values(recipe.make_model()))
