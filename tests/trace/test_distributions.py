"""torch.distributions in a jitted step: samples and densities of the eager step, without reads that check values."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributions as d

from funcamp import jit, loss, make_train_step, stateless
from tests.support.steps import assert_as_eager, traced

SGD = stateless(torch.optim.SGD, lr=0.1)
X = torch.rand(4, 3, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.1
Params = dict[str, Tensor]

KINDS: dict[str, Callable[[Params], Any]] = {
    "Normal": lambda p: d.Normal(p["a"], p["b"].exp()),
    "Uniform": lambda p: d.Uniform(p["a"] - 2, p["b"].exp() + 2),
    "Beta": lambda p: d.Beta(p["a"].exp(), p["b"].exp()),
    "Dirichlet": lambda p: d.Dirichlet(p["a"].exp()),
    "Independent": lambda p: d.Independent(d.Normal(p["a"], p["b"].exp()), 1),
    "tanh of Normal": lambda p: d.TransformedDistribution(
        d.Normal(p["a"], p["b"].exp()), [d.TanhTransform(cache_size=1)]
    ),
}


def start() -> Params:
    return {"a": torch.tensor([0.1, -0.2, 0.3]), "b": torch.tensor([0.2, 0.1, -0.3])}


def assert_same_as_eager(fn: Callable[[Params, Tensor], Any]) -> None:
    step = make_train_step(loss(fn), SGD)
    assert_as_eager(step, traced(step), step.init(start()), [X] * 3)


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("kind", KINDS)
def test_densities_and_differentiable_samples_are_the_eager_ones(kind: str) -> None:
    def fn(params: Params, x: Tensor) -> Any:
        made = KINDS[kind](params)
        x = x / x.sum(-1, keepdim=True) if kind == "Dirichlet" else x
        return made.rsample((4,)).square().mean() - made.log_prob(x).mean()

    assert_same_as_eager(fn)


def test_an_autoencoders_loss_is_the_eager_one() -> None:
    def fn(params: Params, x: Tensor) -> Any:
        posterior, prior = d.Normal(x * params["a"], params["b"].exp()), d.Normal(torch.zeros(3), torch.ones(3))
        rebuilt = d.Bernoulli(logits=posterior.rsample() * params["b"])
        return d.kl_divergence(posterior, prior).mean() - rebuilt.log_prob((x > 0.5).float()).mean()

    assert_same_as_eager(fn)


def test_a_policys_loss_is_the_eager_one() -> None:
    def fn(params: Params, x: Tensor) -> Any:
        policy = d.Categorical(logits=x * params["a"])
        with torch.no_grad():
            actions = policy.sample()
        rewards = x.gather(1, actions[:, None])[:, 0]
        return -(policy.log_prob(actions) * rewards).mean() - 0.1 * policy.entropy().mean() + params["b"].square().sum()

    assert_same_as_eager(fn)


def test_other_threads_check_their_arguments() -> None:
    seen: list[Any] = []

    def look() -> None:
        with pytest.raises(ValueError, match="scale"):
            d.Normal(0.0, -1.0, validate_args=None)
        seen.append("checked")

    def traced(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return state + 1, d.Normal(x, x).log_prob(x)

    d.Distribution.set_default_validate_args(True)  # torch.compile, used before, leaves them off
    jit(traced, backend="eager")(torch.ones(1), torch.ones(1))
    assert seen == ["checked"] * 2  # traced once more, because it changed a list
    with pytest.raises(ValueError, match="scale"):
        d.Normal(0.0, -1.0)
