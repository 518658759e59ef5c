"""torch.distributions in a jitted step: samples and densities of the eager step, without reads that check values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributions as d

from funcamp import loss, make_train_step
from tests.support.steps import SGD, assert_as_eager, traced

X = torch.rand(4, 3, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.1
Params = dict[str, Tensor]


def with_samples(make: Callable[[Params], Any]) -> Callable[[Params, Tensor], Any]:
    """A loss of the density of a batch and of samples that have gradients."""

    def fn(params: Params, x: Tensor) -> Any:
        made = make(params)
        return made.rsample((4,)).square().mean() - made.log_prob(x / x.sum(-1, keepdim=True)).mean()

    return fn


def autoencoder(params: Params, x: Tensor) -> Any:
    posterior, prior = d.Normal(x * params["a"], params["b"].exp()), d.Normal(torch.zeros(3), torch.ones(3))
    rebuilt = d.Bernoulli(logits=posterior.rsample() * params["b"])
    return d.kl_divergence(posterior, prior).mean() - rebuilt.log_prob((x > 0.5).float()).mean()


def policy(params: Params, x: Tensor) -> Any:
    actor = d.Categorical(logits=x * params["a"])
    with torch.no_grad():
        actions = actor.sample()
    rewards = x.gather(1, actions[:, None])[:, 0]
    return -(actor.log_prob(actions) * rewards).mean() - 0.1 * actor.entropy().mean() + params["b"].square().sum()


def normal(params: Params) -> d.Normal:
    return d.Normal(params["a"], params["b"].exp())


LOSSES: dict[str, Callable[[Params, Tensor], Any]] = {
    "autoencoder": autoencoder,
    "policy": policy,
    "Dirichlet": with_samples(lambda p: d.Dirichlet(p["a"].exp())),
    "tanh of Normal": with_samples(lambda p: d.TransformedDistribution(normal(p), [d.TanhTransform(cache_size=1)])),
}


@pytest.mark.thorough(keep=3)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_the_eager_ones_and_arguments_are_checked_again_afterwards(name: str) -> None:
    d.Distribution.set_default_validate_args(True)  # torch.compile, used before, leaves them off
    step = make_train_step(loss(LOSSES[name]), SGD)
    start = {"a": torch.tensor([0.1, -0.2, 0.3]), "b": torch.tensor([0.2, 0.1, -0.3])}
    assert_as_eager(step, traced(step), step.init(start), [X] * 3)
    with pytest.raises(ValueError, match="scale"):
        d.Normal(0.0, -1.0)
