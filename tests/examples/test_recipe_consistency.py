"""A pass under no_grad and one with a gradient of the same module in one autocast region, in either order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import funcamp
from tests.recipes import example
from tests.support.helpers import difference, one_thread
from tests.support.steps import eager, traced

CONFIG = funcamp.ScalerConfig(init_scale=2.0**10)


class Both(nn.Module):
    def __init__(self, is_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_first = is_first
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, plain: Tensor, noisy: Tensor) -> Any:
        """The output with a gradient and the one without, which may come first."""
        outputs = {}
        for requires in (False, True) if self.is_first else (True, False):
            with torch.set_grad_enabled(requires):
                outputs[requires] = self.net(noisy if requires else plain)
        return outputs[True], outputs[False]


def criterion(outputs: tuple[Tensor, Tensor], weight: Tensor) -> Tensor:
    output, target = outputs
    return (weight * (output.float() - target.float()).square()).mean()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    plain, noise = torch.randn(2, 16, 8, generator=generator)
    return plain, plain + noise, torch.rand(16, 4, generator=generator)


def by_torch(is_first: bool, *, cache: bool, dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """The gradients of torch.autocast and backward(), scaled by hand."""
    model = Both(is_first)
    *inputs, weight = batch()
    with torch.autocast("cpu", dtype, cache_enabled=cache, enabled=dtype != torch.float32):
        loss = criterion(model(*inputs), weight)
    (CONFIG.init_scale * loss).backward()
    return {name: value.grad / CONFIG.init_scale for name, value in model.named_parameters() if value.grad is not None}


def by_step(is_first: bool, engine: Any, wrap: Any) -> dict[str, Tensor]:
    """The gradients of a step with a policy: SGD's momentum after one step is the gradient."""
    loss_fn = funcamp.module_loss(Both(is_first), criterion, engine=engine)
    sgd = funcamp.stateless(torch.optim.SGD, lr=1e-2, momentum=0.9)
    step = funcamp.make_train_step(loss_fn, sgd, CONFIG, policy="float16")
    state, metrics = wrap(step)(step.init(flat=False), batch())
    assert metrics.found_inf == 0
    gradients: dict[str, Tensor] = state.opt_state.state["momentum_buffer"].tree()
    return gradients


@pytest.mark.compiled
@pytest.mark.parametrize("engine", ["func", "autograd"])
@pytest.mark.parametrize("wrap", [eager, traced])
@pytest.mark.parametrize("is_first", [True, False])
def test_gradient_is_that_of_autocast_without_a_cache(is_first: bool, engine: Any, wrap: Any) -> None:
    """Older torch put the cast of a weight under no_grad into the cache, and its gradient was lost."""
    actual, expected = by_step(is_first, engine, wrap), by_torch(is_first, cache=False)
    assert all(gradient.count_nonzero() > 0 for gradient in actual.values())
    assert difference(actual, expected) == difference(by_torch(is_first, cache=True), expected) == 0
    assert difference(expected, by_torch(is_first, cache=False, dtype=torch.float32)) < 2e-3


def test_second_term_raises_the_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = example("consistency")
    monkeypatch.setattr(recipe, "criterion", lambda outputs, label: nn.functional.cross_entropy(outputs[0], label))
    with one_thread(), pytest.raises(AssertionError, match=r"^0\.[67]"):
        recipe.main(wrap=eager)
