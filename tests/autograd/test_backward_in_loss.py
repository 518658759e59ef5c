"""A backward pass inside of a loss is refused by name, also if another term of the loss reaches the parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcamp import jit, loss, make_train_step, module_loss, presets, stateless

SGD = stateless(torch.optim.SGD, lr=0.1)
X = torch.randn(8, 4)
REFUSED = r"step: the loss must not call backward\(\), neither in the forward pass nor in a gradient hook.*accumulate="


class InForward(nn.Module):
    """Gradients of its output first, by `backward()`, with other terms or without."""

    def __init__(self, *, other_term: bool) -> None:
        super().__init__()
        self.body, self.head, self.other_term = nn.Linear(4, 8), nn.Linear(8, 1), other_term

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        cached = hidden.detach().requires_grad_()
        self.head(cached).square().mean().backward()
        assert cached.grad is not None
        surrogate: Tensor = (hidden * cached.grad).sum()
        return surrogate + 0.01 * self.head(hidden).mean() if self.other_term else surrogate


class InHook(nn.Module):
    """As cached contrastive losses: the loss is a leaf whose hook computes the outputs again and calls `backward()`."""

    def __init__(self, *, other_term: bool) -> None:
        super().__init__()
        self.body, self.other_term = nn.Linear(4, 8), other_term

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            outputs = self.body(x)
        cached = outputs.requires_grad_()
        (gradient,) = torch.autograd.grad(cached.square().mean(), cached)

        def hook(factor: Tensor) -> None:
            with torch.enable_grad():
                ((self.body(x) * gradient).sum() * factor).backward()

        leaf: Tensor = cached.detach().square().mean().requires_grad_()
        leaf.register_hook(hook)
        if not self.other_term:
            return leaf
        loss_of_both: Tensor = leaf + 0.01 * self.body(x).mean()
        return loss_of_both


def wrapped(step: Any, jitted: bool) -> Any:
    return jit(step, backend="eager") if jitted else step


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("other_term", [False, True])
@pytest.mark.parametrize("cls", [InForward, InHook])
def test_a_backward_pass_in_a_module_is_refused(cls: Any, other_term: bool, jitted: bool) -> None:
    step = make_train_step(module_loss(cls(other_term=other_term)), SGD, policy="bfloat16")
    with pytest.raises(RuntimeError, match=REFUSED):
        wrapped(step, jitted)(step.init(), X)


@pytest.mark.parametrize("engine", ["autograd", "func"])
def test_a_backward_pass_in_a_function_is_refused(engine: Any) -> None:
    def function(params: Any, x: Tensor) -> Tensor:
        (params["w"] * x).sum().backward()
        total: Tensor = params["w"].square().sum()
        return total

    step = make_train_step(loss(function, engine=engine), SGD)
    with pytest.raises(RuntimeError, match=r"step: the loss must not call backward\(\)"):
        step(step.init({"w": torch.ones(4)}), X)


class InBackward(nn.Module):
    """A hook on a hidden tensor, which every backward pass runs, so that its gradients count as in torch's loop."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)

        def hook(gradient: Tensor) -> None:
            with torch.enable_grad():
                self.head(gradient.detach()).sum().backward()

        hidden.register_hook(hook)
        out: Tensor = self.head(hidden).mean()
        return out


class OfInput(nn.Module):
    """A backward pass that reaches no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        moved = x.detach().clone().requires_grad_()
        moved.square().sum().backward()
        assert moved.grad is not None
        out: Tensor = self.body(x + 0.1 * moved.grad).mean()
        return out


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("cls", [InBackward, OfInput])
def test_other_backward_passes_are_torchs(cls: Any, jitted: bool) -> None:
    model = cls()
    own = copy.deepcopy(model)
    own(X).backward()
    step = make_train_step(module_loss(model), SGD, presets.disabled())
    state, _ = wrapped(step, jitted)(step.init(), X)
    for name, parameter in own.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(state.params[name], parameter.detach() - 0.1 * parameter.grad)


def test_a_loss_of_a_module_that_reaches_no_parameter_has_its_own_advice() -> None:
    class Detached(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach().requires_grad_()

    step = make_train_step(module_loss(Detached(4, 1), F.mse_loss), SGD)
    with pytest.raises(ValueError, match=r"it uses none. compute it from the output of the model"):
        step(step.init(), (X, torch.zeros(8, 1)))


@pytest.mark.parametrize("jitted", [False, True])
def test_a_layer_of_another_shape_in_the_place_of_one_is_refused(jitted: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    step = make_train_step(module_loss(model, F.cross_entropy), SGD)
    run, batch = wrapped(step, jitted), (X, torch.arange(8) % 3)
    state, _ = run(step.init(), batch)
    model[1] = nn.Linear(8, 3)
    state, _ = run(state, batch)  # the values are the state's
    model[1] = nn.Linear(8, 5)
    with pytest.raises(ValueError, match=r"'1.weight' had the shape \(3, 8\) and has \(5, 8\): make the loss again"):
        run(state, batch)
    with pytest.raises(ValueError, match=r"'1.weight' had the shape"):
        step.init()
