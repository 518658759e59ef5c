"""What a module's own parameters have besides values: their class and attributes, and that no step follows hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcamp import ScalerConfig, jit, make_train_step, module_loss, stateless
from tests.support.helpers import assert_same

SGD = stateless(torch.optim.SGD, lr=0.1)
BATCH = (torch.linspace(-1, 1, 12).reshape(3, 4), torch.ones(3, 4))


class Asks(nn.Module):
    """Asks its parameters and a buffer for more than values."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.layer, self.scale = what, nn.Linear(4, 4), nn.Parameter(torch.tensor(0.5))
        self.table: Any
        self.register_buffer("table", torch.ones(4))
        weight: Any = self.layer.weight
        weight.gain = 2.0
        self.table.gain = 3.0

    def forward(self, x: Tensor) -> Any:
        out = self.layer(x)
        weight: Any = self.layer.weight
        if self.what == "class":
            return out * (self.scale.exp() if isinstance(self.scale, nn.Parameter) else self.scale)
        if self.what == "attribute":
            return out * weight.gain
        return out * self.table.gain * self.table


def losses_of_torch(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(BATCH[0]), BATCH[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return losses


def losses_of_step(model: nn.Module, compiled: bool, consume: bool = False, policy: str | None = None) -> list[Tensor]:
    step = make_train_step(module_loss(model, F.mse_loss), SGD, ScalerConfig(1.0), policy=policy)
    run: Any = jit(step, backend="eager") if compiled else step
    state, losses = step.init(consume=consume), []
    for _ in range(3):
        state, metrics = run(state, BATCH)
        losses.append(metrics.loss)
    return losses


def made(what: str) -> nn.Module:
    torch.manual_seed(0)
    return Asks(what)


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("consume", [False, True])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("what", ["class", "attribute", "buffer's attribute"])
def test_a_value_is_like_the_modules_own_tensor(what: str, compiled: bool, consume: bool) -> None:
    model = made(what)
    assert_same(losses_of_step(model, compiled, consume), losses_of_torch(made(what)))


def test_the_callers_tensors_get_no_attributes() -> None:
    model = made("class")
    loss_fn = module_loss(model, F.mse_loss)
    values = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    buffers = loss_fn.buffers()
    for _ in range(2):
        loss_fn(values, buffers, BATCH)[0].backward()
    assert not any(vars(value) for value in (*values.values(), *buffers.values()))


def test_a_hook_on_a_parameter_is_refused_with_the_fix() -> None:
    message = r"parameters must have no hook on their gradients; got one on '0.bias': change .* in a part of a chain"
    registrations: list[Callable[[Tensor], Any]] = [
        lambda parameter: parameter.register_hook(torch.neg),
        lambda parameter: parameter.register_post_accumulate_grad_hook(lambda p: None),
    ]
    for register in registrations:
        model = nn.Sequential(nn.Linear(4, 4))
        step = make_train_step(module_loss(model, F.mse_loss), SGD)
        handle = register(model.get_parameter("0.bias"))
        with pytest.raises(ValueError, match=message):
            module_loss(model, F.mse_loss)
        with pytest.raises(ValueError, match=message):
            step.init()
        handle.remove()
        step(step.init(), BATCH)
        register(model.get_parameter("0.bias"))
        model.get_parameter("0.bias").requires_grad_(False)
        module_loss(model, F.mse_loss)


class Clipped(nn.Linear):
    """Writes its weight through a view in the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.detach()[1:].zero_()
        return super().forward(x)


@pytest.mark.thorough(keep=2)
@pytest.mark.compiled
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("policy", [None, "bfloat16"])
def test_a_write_of_a_parameter_is_refused(policy: str | None, compiled: bool) -> None:
    with pytest.raises(ValueError, match=r"must not write to its parameters in the forward pass; it wrote to '\w+'"):
        losses_of_step(Clipped(4, 4), compiled, policy=policy)
