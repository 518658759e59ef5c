"""Hooks of parameters, which see gradients times the scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from funcamp.report.audit import Auditor
from tests.report.loops.parts import batches, model_and_optimizer, scaler_of
from tests.report.training import train

norms: list[float] = []
Hook: TypeAlias = Callable[[Tensor], Any]


def clamp(gradient: Tensor) -> Tensor:
    return gradient.clamp(-1, 1)


def clamp_in_place(gradient: Tensor) -> None:
    gradient.clamp_(-1, 1)


def log(gradient: Tensor) -> None:
    norms.append(gradient.norm().item())


def mask_and_log(gradient: Tensor) -> Tensor:
    masked = gradient * torch.ones_like(gradient)
    norms.append(masked.norm().item())
    return masked


def mask(gradient: Tensor) -> Tensor:
    return gradient * torch.ones_like(gradient)


def halve(gradient: Tensor) -> Tensor:
    return gradient / 2


def clip_after(parameter: Tensor) -> None:
    nn.utils.clip_grad_norm_(parameter, 1.0)


def log_after(parameter: Tensor) -> None:
    assert parameter.grad is not None
    norms.append(parameter.grad.norm().item())


def on_gradients(hook: Hook) -> Callable[[nn.Module], None]:
    def register(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_hook(hook)

    return register


def after_gradients(hook: Hook) -> Callable[[nn.Module], None]:
    def register(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)

    return register


@pytest.mark.parametrize(
    ("register", "hook", "name"),
    [
        (on_gradients, clamp, "clip-before-unscale"),
        (on_gradients, clamp_in_place, "clip-before-unscale"),
        (on_gradients, log, "read-before-unscale"),
        (on_gradients, mask_and_log, "read-before-unscale"),
        (after_gradients, clip_after, "clip-before-unscale"),
        (after_gradients, log_after, "read-before-unscale"),
    ],
)
def test_a_hook_that_clips_or_reads_scaled_gradients_is_named(
    register: Callable[[Hook], Callable[[nn.Module], None]], hook: Hook, name: str
) -> None:
    (finding,) = train(prepare=register(hook)).findings()
    assert finding.rule.name == name
    first_line = hook.__code__.co_firstlineno
    assert first_line < finding.line.number <= first_line + 2
    assert finding.times == 6 * 4
    assert train(prepare=register(hook), scaled=False).findings() == []


@pytest.mark.parametrize("hook", [mask, halve])
@pytest.mark.parametrize("window", [1, 2])
def test_a_hook_that_changes_gradients_by_a_factor_has_no_finding(hook: Hook, window: int) -> None:
    assert train(prepare=on_gradients(hook), window=window).findings() == []


def test_a_gradient_that_a_hook_masked_is_still_scaled() -> None:
    def log_each(model: nn.Module) -> None:
        for parameter in model.parameters():
            log_after(parameter)

    (finding,) = train(prepare=on_gradients(mask), before_step=log_each).findings()
    assert finding.rule.name == "read-before-unscale"


def unscale(gradient: Tensor) -> Tensor:
    return gradient / 2.0**10


def unscale_after(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad / 2.0**10


@pytest.mark.parametrize(("register", "hook"), [(on_gradients, unscale), (after_gradients, unscale_after)])
def test_a_hook_that_unscales_leaves_gradients_that_an_optimizer_may_use(
    register: Callable[[Hook], Callable[[nn.Module], None]], hook: Hook
) -> None:
    auditor = Auditor()
    with auditor.watching():
        model, optimizer = model_and_optimizer()
        register(hook)(model)
        scaler = scaler_of()
        for x, y in batches():
            optimizer.zero_grad()
            scaler.scale(mse_loss(model(x), y)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert auditor.findings() == []


def test_what_a_hook_returns_is_what_it_returns_without_the_auditor() -> None:
    weight = torch.ones(2, requires_grad=True)

    def gradient() -> list[float]:
        weight.grad = None
        weight.sum().backward()
        assert weight.grad is not None
        return list(weight.grad.tolist())

    with Auditor().watching():
        handle = weight.register_hook(halve)
        assert gradient() == [0.5, 0.5]
    assert gradient() == [0.5, 0.5]
    handle.remove()
    assert gradient() == [1.0, 1.0]


def test_a_step_in_a_hook_of_the_backward_pass_is_named_if_the_gradient_is_scaled() -> None:
    auditor = Auditor()
    with auditor.watching():
        model, _ = model_and_optimizer()
        scaler = scaler_of()
        for parameter in model.parameters():
            sgd = torch.optim.SGD([parameter], lr=0.01)

            def step(_: Tensor, sgd: torch.optim.Optimizer = sgd) -> None:
                sgd.step()
                sgd.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        for x, y in batches():
            scaler.scale(mse_loss(model(x), y)).backward()
    (finding,) = auditor.findings()
    assert finding.rule.name == "optimizer-step-on-scaled"


def test_a_hook_called_by_autograd_grad_leaves_no_event_for_the_next_pass() -> None:
    auditor = Auditor()
    with auditor.watching():
        weight = torch.ones(2, requires_grad=True)
        sgd = torch.optim.SGD([weight], lr=0.1)
        scaler = scaler_of()
        handle = weight.register_hook(log)
        torch.autograd.grad(weight.sum(), weight)
        handle.remove()
        scaler.scale(weight.sum()).backward()
        scaler.step(sgd)
        scaler.update()
    assert auditor.findings() == []
