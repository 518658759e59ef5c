"""A pass under no_grad and one with a gradient of the same module in one autocast region, in either order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import funcamp
from tests.recipes import example
from tests.support.helpers import difference, one_thread

Engine = Literal["func", "autograd"]
Wrap = Callable[[Any], Any]

jit = functools.partial(funcamp.jit, backend="eager")
CONFIG = funcamp.ScalerConfig(init_scale=2.0**10)
ORDERS = ("no_grad first", "no_grad last")


class Both(nn.Module):
    def __init__(self, order: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order = order
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, plain: Tensor, noisy: Tensor) -> tuple[Tensor, Tensor]:
        if self.order == "no_grad first":
            target = self.without(plain)
            return self.net(noisy), target
        output = self.net(noisy)
        return output, self.without(plain)

    def without(self, plain: Tensor) -> Tensor:
        with torch.no_grad():
            return self.net(plain)  # type: ignore[no-any-return]


def criterion(outputs: tuple[Tensor, Tensor], weight: Tensor) -> Tensor:
    output, target = outputs
    return (weight * (output.float() - target.float()).square()).mean()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    plain, noise = torch.randn(2, 16, 8, generator=generator)
    return plain, plain + noise, torch.rand(16, 4, generator=generator)


def by_torch(order: str, *, cache: bool, dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """The gradients of torch.autocast and backward(), scaled by hand."""
    model = Both(order)
    *inputs, weight = batch()
    with torch.autocast("cpu", dtype, cache_enabled=cache, enabled=dtype != torch.float32):
        loss = criterion(model(*inputs), weight)
    (CONFIG.init_scale * loss).backward()
    return {name: value.grad / CONFIG.init_scale for name, value in model.named_parameters() if value.grad is not None}


def by_policy(order: str, engine: Engine, wrap: Wrap) -> dict[str, Tensor]:
    """The gradients of a step with a policy: SGD's momentum after one step is the gradient."""
    loss_fn = funcamp.module_loss(Both(order), criterion, engine=engine)
    sgd = funcamp.stateless(torch.optim.SGD, lr=1e-2, momentum=0.9)
    step = funcamp.make_train_step(loss_fn, sgd, CONFIG, policy="float16")
    state, metrics = wrap(step)(step.init(flat=False), batch())
    assert metrics.found_inf == 0
    gradients: dict[str, Tensor] = state.opt_state.state["momentum_buffer"].tree()
    return gradients


def by_autocast(order: str, engine: Engine, wrap: Wrap) -> dict[str, Tensor]:
    """The gradients where the loss has torch.autocast in it and there is no policy."""
    model = Both(order)

    def loss_of(params: dict[str, Tensor], batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        *inputs, weight = batch
        with torch.autocast("cpu", torch.float16):
            return criterion(functional_call(model, params, tuple(inputs)), weight)

    graded = funcamp.scaled_grad_and_value(loss_of, engine=engine)

    def step(state: Any, batch: Any) -> Any:
        params, _, scaler = state
        (gradients, scaler), loss = graded(scaler, params, batch)
        return (params, gradients, scaler), loss

    params = funcamp.clone(dict(model.named_parameters()))
    (_, gradients, _), _ = wrap(step)((params, funcamp.clone(params), funcamp.init(CONFIG)), batch())
    return gradients  # type: ignore[no-any-return]


@pytest.mark.parametrize("order", ORDERS)
def test_eager_autocast_keeps_the_gradient_behind_its_cache(order: str) -> None:
    """Older torch put the cast of a weight under no_grad into the cache, and its gradient was lost."""
    cached, fresh = by_torch(order, cache=True), by_torch(order, cache=False)
    assert difference(cached, fresh) == 0
    assert difference(fresh, by_torch(order, cache=False, dtype=torch.float32)) < 2e-3


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("wrap", [lambda step: step, jit], ids=["eager", "compiled"])
@pytest.mark.parametrize("engine", ["func", "autograd"])
@pytest.mark.parametrize("gradients_of", [by_policy, by_autocast])
@pytest.mark.parametrize("order", ORDERS)
def test_gradient_is_that_of_autocast_without_a_cache(
    order: str, gradients_of: Any, engine: Engine, wrap: Wrap
) -> None:
    actual = gradients_of(order, engine, wrap)
    assert all(gradient.count_nonzero() > 0 for gradient in actual.values())
    assert difference(actual, by_torch(order, cache=False)) == 0


def test_second_term_raises_the_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = example("consistency")
    monkeypatch.setattr(recipe, "criterion", lambda outputs, label: nn.functional.cross_entropy(outputs[0], label))
    with one_thread(), pytest.raises(AssertionError, match=r"^0\.[67]"):
        recipe.main(wrap=lambda step: step)
