"""What the first call of a module's loss refuses by name, instead of an error of torch or a value that is lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from funcamp import ScalerConfig, jit, make_train_step, module_loss, stateless
from tests.support.helpers import assert_same

SGD = stateless(torch.optim.SGD, lr=0.1)
BATCH = (torch.linspace(-1, 1, 12).reshape(3, 4), torch.ones(3, 4))
eager_and_jit = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])


def steps(model: nn.Module, compiled: bool, criterion: Any = F.mse_loss, batch: Any = BATCH, count: int = 2) -> Any:
    step = make_train_step(module_loss(model, criterion), SGD, ScalerConfig(1.0))
    run: Any = jit(step, backend="eager") if compiled else step
    state, losses = step.init(), []
    for _ in range(count):
        state, metrics = run(state, batch)
        losses.append(metrics.loss)
    return losses


def assert_same_losses_as_torch(make: Callable[[], nn.Module], compiled: bool, count: int = 2) -> None:
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for _ in range(count):
        optimizer.zero_grad()
        value = F.mse_loss(model(BATCH[0]), BATCH[1])
        value.backward()
        optimizer.step()
        expected.append(value.detach())
    torch.manual_seed(0)
    assert_same(steps(make(), compiled, count=count), expected)


class Freezes(nn.Module):
    """Freezes a parameter from a certain call on."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.layer, self.scale, self.left = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), at

    def forward(self, x: Tensor) -> Tensor:
        if self.left == 0:
            self.scale.requires_grad_(False)
        self.left -= 1
        out: Tensor = self.layer(x) * self.scale
        return out


@pytest.mark.parametrize("at", [0, 1])
def test_a_parameter_that_a_forward_pass_freezes(at: int) -> None:
    with pytest.raises(RuntimeError, match=r"the loss must not freeze a parameter that it is given, requires_grad_"):
        steps(Freezes(at), compiled=False)


@pytest.mark.compiled
def test_an_attribute_of_a_tensor_of_the_batch_is_named_under_jit() -> None:
    class Masked(nn.Linear):
        def forward(self, x: Any) -> Tensor:
            out: Tensor = super().forward(x) * x.mask
            return out

    x: Any = BATCH[0].clone()
    x.mask = torch.ones(3, 4)
    steps(Masked(4, 4), compiled=False, batch=(x, BATCH[1]))
    message = r"jit: batch\[0\] must be a tensor without attributes of its own, .* with .mask: pass mask as a part"
    with pytest.raises(TypeError, match=message):
        steps(Masked(4, 4), compiled=True, batch=(x, BATCH[1]))


@dataclasses.dataclass
class Config:
    scale: float = 2.0


class Unhashable:
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("constant", "advice"),
    [(Config(), r"make it immutable, @dataclass\(frozen=True\)"), (Unhashable(), r"give it a __hash__ that follows")],
)
def test_the_advice_for_a_constant_that_cannot_be_hashed(constant: Any, advice: str) -> None:
    run = jit(lambda state, batch: (state + batch[0].sum(), None), backend="eager")
    with pytest.raises(TypeError, match=rf"jit: batch\[1\] must be .*; got .*: {advice}"):
        run(torch.zeros(()), (torch.ones(3), constant))


class Meter:
    """A criterion that only records."""

    def __init__(self, how: str) -> None:
        self.how, self.count, self.total, self.cache = how, 0, 0.0, None

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        value = F.mse_loss(out, y)
        kept: Any = self
        self.count += 1
        if self.how == "sum":
            kept.total = kept.total + value.detach()
        elif self.how == "average":
            kept.mean = value.detach() / self.count
        elif self.how == "cache":
            if self.cache is None:
                kept.cache = torch.ones(4)
            kept.mean = value.detach() / self.count
            value = value * kept.cache.mean()
        return value


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("how", ["count", "sum", "average", "cache"])
def test_what_is_only_recorded_is_logged_and_not_refused(how: str, caplog: pytest.LogCaptureFixture) -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        results.append(steps(nn.Linear(4, 4), compiled, Meter(how)))
    assert_same(results[1], results[0])
    assert "what the step's Python keeps stays that of the first call: criterion.count" in caplog.text


class Hooked(nn.Module):
    """Has a hook that keeps something of the gradient in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = torch.zeros(())
        self.layer.register_full_backward_hook(self.look)

    def look(self, layer: nn.Module, given: Any, taken: Any) -> None:
        self.norm.copy_(taken[0].norm())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.first(x)) * (1 + self.norm)
        return out


def test_a_plain_attribute_that_a_hook_of_the_backward_pass_writes_is_as_in_torchs_loop() -> None:
    assert_same_losses_as_torch(Hooked, compiled=False, count=3)


@pytest.mark.compiled
def test_a_jitted_step_writes_no_plain_attribute() -> None:
    with pytest.raises(RuntimeError, match=r"it writes into model\.norm"):
        assert_same_losses_as_torch(Hooked, compiled=True)


@pytest.mark.compiled
@eager_and_jit
def test_a_checkpoint_that_writes_buffers_again_is_no_hook(compiled: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.part, x, use_reentrant=False)

    assert_same_losses_as_torch(Checkpointed, compiled)
