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


def replace(gradient: Tensor) -> Tensor:
    return torch.nan_to_num(gradient)


def clip_after(parameter: Tensor) -> None:
    nn.utils.clip_grad_norm_(parameter, 1.0)


def log_after(parameter: Tensor) -> None:
    assert parameter.grad is not None
    norms.append(parameter.grad.norm().item())


def registered(hook: Hook, *, after: bool = False) -> Callable[[nn.Module], None]:
    """Return a function that registers a hook for each parameter: for its gradient, or for after it is stored."""

    def register(model: nn.Module) -> None:
        for parameter in model.parameters():
            (parameter.register_post_accumulate_grad_hook if after else parameter.register_hook)(hook)

    return register


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        (clamp, "clip-before-unscale"),
        (clamp_in_place, "clip-before-unscale"),
        (log, "read-before-unscale"),
        (mask_and_log, "read-before-unscale"),
        (replace, "overflow-replaced"),
        (clip_after, "clip-before-unscale"),
        (log_after, "read-before-unscale"),
    ],
)
def test_a_hook_that_clips_reads_or_replaces_scaled_gradients_is_named(hook: Hook, name: str) -> None:
    prepare = registered(hook, after=hook in (clip_after, log_after))
    (finding,) = train(prepare=prepare).findings()
    assert finding.rule.name == name
    first_line = hook.__code__.co_firstlineno
    assert first_line < finding.line.number <= first_line + 2


def test_a_gradient_that_a_hook_masked_is_still_scaled() -> None:
    def log_each(model: nn.Module) -> None:
        for parameter in model.parameters():
            log_after(parameter)

    prepare = registered(lambda gradient: gradient * torch.ones_like(gradient))
    (finding,) = train(prepare=prepare, before_step=log_each).findings()
    assert finding.rule.name == "read-before-unscale"


@pytest.mark.parametrize("window", [1, 2])
def test_a_hook_that_changes_gradients_by_a_factor_has_no_finding(window: int) -> None:
    assert train(prepare=registered(lambda gradient: gradient / 2), window=window).findings() == []


def unscale(gradient: Tensor) -> Tensor:
    return gradient / 2.0**10


def unscale_after(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad / 2.0**10


@pytest.mark.parametrize("hook", [unscale, unscale_after])
def test_a_hook_that_unscales_leaves_gradients_that_an_optimizer_may_use(hook: Hook) -> None:
    auditor = Auditor()
    with auditor.watching():
        model, optimizer = model_and_optimizer()
        registered(hook, after=hook is unscale_after)(model)
        scaler = scaler_of()
        for x, y in batches():
            optimizer.zero_grad()
            scaler.scale(mse_loss(model(x), y)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert auditor.findings() == []


def test_a_step_in_a_hook_of_the_backward_pass_is_named_if_the_gradient_is_scaled() -> None:
    auditor = Auditor()
    with auditor.watching():
        model, _ = model_and_optimizer()
        for parameter in model.parameters():
            sgd = torch.optim.SGD([parameter], lr=0.01)

            def step(_: Tensor, sgd: torch.optim.Optimizer = sgd) -> None:
                sgd.step()
                sgd.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        scaler = scaler_of()
        for x, y in batches():
            scaler.scale(mse_loss(model(x), y)).backward()
    (finding,) = auditor.findings()
    assert finding.rule.name == "optimizer-step-on-scaled"
