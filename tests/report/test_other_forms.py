"""Mistakes in other forms than those of the loops, and what looks like them and is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from funcamp.report.audit import Auditor
from funcamp.report.tracked import Tracked
from tests.report.loops.parts import batches, gradients_of, losses, model_and_optimizer, scaler_of
from tests.report.training import names, train

CLIP, READ, REPLACED = "clip-before-unscale", "read-before-unscale", "overflow-replaced"


def mask_and_clip(model: nn.Module) -> None:
    gradients_of(model)[0].mul_(torch.ones(8, 4))
    torch.nn.utils.clip_grad_norm_(next(model.parameters()), 1.0)


def average_and_clip(model: nn.Module) -> None:
    for gradient in gradients_of(model):
        gradient.div_(2)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def multiply_by_coefficient(model: nn.Module) -> None:
    norm = torch.stack([gradient.norm() for gradient in gradients_of(model)]).norm()
    factor = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
    for gradient in gradients_of(model):
        gradient.mul_(factor)


def multiply_if_below_1(model: nn.Module) -> None:
    norm = torch.stack([gradient.norm() for gradient in gradients_of(model)]).norm()
    factor = 1.0 / (norm + 1e-6)
    if factor < 1:  # else the gradients have another length
        torch._foreach_mul_(gradients_of(model), factor)


#: What is done to the gradients of a model before its step.
OF_MODEL: list[tuple[str, Callable[[nn.Module], object]]] = [
    (CLIP, lambda model: torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(10.0))),
    (CLIP, mask_and_clip),
    (CLIP, average_and_clip),
    (CLIP, lambda model: max(gradient.abs().max() for gradient in gradients_of(model)) < 6e4),
    (CLIP, multiply_by_coefficient),
    (CLIP, multiply_if_below_1),
    (READ, lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()),
    ("cleared-before-step", lambda model: [gradient.zero_() for gradient in gradients_of(model)]),
]
#: What takes the place of each gradient.
OF_GRADIENT: list[tuple[str, Callable[[Tensor, Tensor], Tensor]]] = [
    (CLIP, lambda _, gradient: gradient.clamp(-1, 1)),
    (CLIP, lambda _, gradient: torch.minimum(gradient, torch.tensor(0.1))),
    (CLIP, lambda _, gradient: torch.where(gradient.abs() > 0.5, 0.5 * gradient.sign(), gradient)),
    (REPLACED, lambda _, gradient: gradient.index_put_((~torch.isfinite(gradient),), torch.tensor(0.0))),
    (REPLACED, lambda _, gradient: gradient.masked_fill_(gradient.isnan() | gradient.isinf(), 0.0)),
    (REPLACED, lambda _, gradient: torch.where(torch.isfinite(gradient), gradient, torch.zeros_like(gradient))),
    (REPLACED, lambda _, gradient: torch.nan_to_num(gradient).clone()),
]


@pytest.mark.parametrize(("rule", "mistake"), [*OF_MODEL, *OF_GRADIENT])
def test_a_mistake_on_gradients_is_named_with_its_line(rule: str, mistake: Any) -> None:
    way: Any = "before_step" if (rule, mistake) in OF_MODEL else "change"
    (finding,) = train(autocast=True, **{way: mistake}).findings()
    assert finding.rule.name == rule
    first_line = mistake.__code__.co_firstlineno
    assert first_line <= finding.line.number < first_line + 5


@pytest.mark.parametrize(
    ("divide", "expected"),
    [
        (lambda gradient, scale: gradient / scale, ["divided-twice"]),
        (lambda gradient, scale: gradient * (1 / scale), ["divided-twice"]),
        (lambda gradient, scale: gradient.copy_(gradient / scale), ["divided-twice"]),
        (lambda gradient, scale: (gradient / scale).mul_(scale), []),
        (lambda gradient, scale: (gradient / scale) * scale, []),
    ],
)
def test_gradients_that_become_others_divided_by_the_scale_are_divided_twice(
    divide: Callable[[Tensor, float], Tensor], expected: list[str]
) -> None:
    auditor = Auditor()
    with auditor.watching():
        model, optimizer = model_and_optimizer()
        scaler = scaler_of()
        for loss in losses(model):
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad = divide(parameter.grad, scaler.get_scale())
            if expected:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert names(auditor) == expected
    assert all(finding.line.number == divide.__code__.co_firstlineno for finding in auditor.findings())


def step_by_hand(parameter: Tensor, gradient: Tensor) -> Tensor:
    parameter.data -= 1e-6 * gradient
    return gradient


def prune(parameter: Tensor, gradient: Tensor) -> Tensor:
    gradient[parameter == 0] = 0
    gradient.masked_fill_(gradient == 0, 0.0)
    assert gradient.isfinite().all()
    assert len(torch.where(gradient.isnan())[0]) == 0
    return gradient


@pytest.mark.parametrize("change", [step_by_hand, prune])
def test_what_is_no_mistake_on_gradients_has_no_finding(change: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert names(train(change=change, autocast=True)) == []


def root_of_zero_after(applied: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a loss whose later passes take the root of 0."""
    passes = iter(range(99))

    def loss_of(outputs: Tensor, _: Tensor) -> Tensor:
        return (outputs - outputs.detach() * (next(passes) >= applied)).square().sqrt().mean()

    return loss_of


@pytest.mark.parametrize(("applied", "passes", "is_mistake"), [(1, 8, False), (0, 10, False), (0, 12, True)])
def test_skipped_steps_are_a_mistake_if_they_are_many_and_the_scale_is_low(
    applied: int, passes: int, is_mistake: bool
) -> None:
    assert names(train(loss_of=root_of_zero_after(applied), passes=passes)) == ["each-step-skipped"] * is_mistake


def test_a_fused_optimizer_skips_its_step_itself() -> None:
    auditor = Auditor()
    loss_of = root_of_zero_after(1)
    with auditor.watching():
        model, _ = model_and_optimizer()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        scaler = scaler_of()
        for x, y in batches(12):
            optimizer.zero_grad()
            scaler.scale(loss_of(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert names(auditor) == ["each-step-skipped"]


class Subclass(Tensor):
    """The report does not look at the memory of such a tensor."""


@pytest.mark.parametrize(("is_scaled", "expected"), [(True, ["scaled-loss-read"]), (False, [])])
def test_only_the_scaled_loss_itself_is_one_if_it_is_a_tensor_of_a_subclass(
    is_scaled: bool, expected: list[str]
) -> None:
    auditor = Auditor()
    with auditor.watching():
        model, optimizer = model_and_optimizer()
        scaler = scaler_of()
        for loss in losses(model):
            optimizer.zero_grad()
            loss = loss.as_subclass(Subclass)
            scaled_loss = scaler.scale(loss)
            scaled_loss.backward()
            (scaled_loss if is_scaled else loss).item()
            scaler.step(optimizer)
            scaler.update()
    assert names(auditor) == expected


def test_a_gradient_of_a_subclass_is_not_remembered() -> None:
    """There may be another one in each step."""
    tracked = Tracked()
    gradient = torch.ones(2).as_subclass(Subclass)
    tracked.remember_gradient(tracked.key(gradient), gradient)
    assert tracked._gradients == {}


@pytest.mark.parametrize("is_mistake", [True, False])
def test_a_discriminator_may_be_stepped_after_the_passes_that_are_watched(is_mistake: bool) -> None:
    """It is certain if a loss of its own was differentiated."""
    auditor = Auditor(8)
    with auditor.watching():
        model, optimizer = model_and_optimizer()
        critic = nn.Linear(1, 1)
        critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
        scaler = scaler_of()
        for x, y in batches(20):
            optimizer.zero_grad()
            critic_optimizer.zero_grad()
            scaler.scale(mse_loss(critic(model(x)), y)).backward()
            if is_mistake:
                scaler.scale(critic(y).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert names(auditor) == ["optimizer-not-stepped"] * is_mistake


def test_the_sum_of_gradients_of_two_scalers_is_a_mistake() -> None:
    other = scaler_of()

    def differentiate_another(model: nn.Module) -> None:
        other.scale(model(torch.ones(1, 4)).sum()).backward()

    assert names(train(before_step=differentiate_another, passes=1)) == ["update-in-window"]


@pytest.mark.parametrize("clears", [False, True])
def test_passes_without_a_step_are_a_mistake_of_a_cut_run_if_gradients_are_cleared(clears: bool) -> None:
    def clear(model: nn.Module) -> None:
        if clears:
            model.zero_grad()

    auditor = train(before_step=clear, passes=12, limit=8, window=99)
    assert names(auditor) == ["scaled-backward-no-step"] * clears
