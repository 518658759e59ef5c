"""Mistakes in other forms than those of the loops, and runs that the auditor ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from funcamp.report.audit import Auditor
from tests.report.loops.parts import batches, model_and_optimizer, scaler_of
from tests.report.training import train


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clamp(-1, 1)


def clip_with_norm(model: nn.Module) -> None:
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(10.0))


def mask_and_clip(model: nn.Module) -> None:
    weight = next(model.parameters())
    assert weight.grad is not None
    weight.grad.mul_(torch.ones_like(weight))
    torch.nn.utils.clip_grad_norm_(weight, 1.0)


def average_and_clip(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= 2
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("clip", [clamp, clip_with_norm, mask_and_clip, average_and_clip])
def test_clipping_before_unscale_is_named_in_every_form(clip: Callable[[nn.Module], None]) -> None:
    (finding,) = train(before_step=clip, autocast=True).findings()
    assert finding.rule.name == "clip-before-unscale"
    first_line = clip.__code__.co_firstlineno
    assert first_line < finding.line.number < first_line + 8


def bound_by_a_number(gradient: Tensor) -> Tensor:
    return torch.minimum(gradient, torch.tensor(0.1))


def test_a_bound_by_another_tensor_is_a_clipping() -> None:
    def replace(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = bound_by_a_number(gradient_of(parameter))

    (finding,) = train(before_step=replace, autocast=True).findings()
    assert finding.rule.name == "clip-before-unscale"
    assert finding.line.text == "return torch.minimum(gradient, torch.tensor(0.1))"


def largest_over_threshold(model: nn.Module) -> None:
    assert max(gradient_of(parameter).abs().max() for parameter in model.parameters()) < 6e4


def elements_over_threshold(model: nn.Module) -> None:
    for parameter in model.parameters():
        gradient = gradient_of(parameter)
        parameter.grad = torch.where(gradient.abs() > 0.5, 0.5 * gradient.sign(), gradient)


def norm_without_bound(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()


def coefficient(model: nn.Module) -> None:
    norm = torch.stack([gradient_of(parameter).norm() for parameter in model.parameters()]).norm()
    factor = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
    for parameter in model.parameters():
        gradient_of(parameter).mul_(factor)


def largest_of_host(model: nn.Module) -> None:
    assert gradient_of(next(model.parameters())).norm().item() > 0.5


def coefficient_below_1(model: nn.Module) -> None:
    norm = torch.stack([gradient_of(parameter).norm() for parameter in model.parameters()]).norm()
    factor = 1.0 / (norm + 1e-6)
    if factor < 1:  # else the gradients have another length
        for parameter in model.parameters():
            gradient_of(parameter).mul_(factor)


READS = [largest_over_threshold, elements_over_threshold, norm_without_bound, coefficient, largest_of_host]
READS += [coefficient_below_1]


@pytest.mark.parametrize("read", READS)
def test_a_number_that_grows_with_the_scale_is_named_in_every_form(read: Callable[[nn.Module], None]) -> None:
    findings = train(before_step=read, autocast=True).findings()
    assert {finding.rule.name for finding in findings} == {"read-before-unscale"}
    first_line = read.__code__.co_firstlineno
    assert all(first_line < finding.line.number < first_line + 5 for finding in findings)


def test_a_step_by_hand_adds_nothing_to_gradients() -> None:
    def move(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.data -= 1e-6 * gradient_of(parameter)

    assert train(before_step=move, autocast=True).findings() == []


def clean(gradient: Tensor) -> Tensor:
    return gradient.nan_to_num(0.0)


def clean_in_place(gradient: Tensor) -> None:
    gradient.nan_to_num_(0.0)


@pytest.mark.parametrize("hook", [clean, clean_in_place])
def test_a_hook_that_replaces_inf_is_named(hook: Callable[[Tensor], Tensor | None]) -> None:
    def register(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_hook(hook)

    (finding,) = train(prepare=register, autocast=True).findings()
    assert finding.rule.name == "overflow-replaced"
    assert "nan_to_num" in finding.line.text


def set_to_zero(model: nn.Module) -> None:
    for parameter in model.parameters():
        gradient_of(parameter)[~torch.isfinite(gradient_of(parameter))] = 0


def fill(model: nn.Module) -> None:
    for parameter in model.parameters():
        gradient = gradient_of(parameter)
        gradient.masked_fill_(gradient.isnan() | gradient.isinf(), 0.0)


def choose(model: nn.Module) -> None:
    for parameter in model.parameters():
        gradient = gradient_of(parameter)
        parameter.grad = torch.where(torch.isfinite(gradient), gradient, torch.zeros_like(gradient))


def replace_numbers(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.nan_to_num(gradient_of(parameter)).clone()


@pytest.mark.parametrize("replace", [set_to_zero, fill, choose, replace_numbers])
def test_a_replaced_overflow_is_named_in_every_form(replace: Callable[[nn.Module], None]) -> None:
    (finding,) = train(before_step=replace, autocast=True).findings()
    assert finding.rule.name == "overflow-replaced"
    assert replace.__code__.co_firstlineno < finding.line.number < replace.__code__.co_firstlineno + 5


def test_other_masks_replace_no_overflow() -> None:
    def prune(model: nn.Module) -> None:
        for parameter in model.parameters():
            gradient = gradient_of(parameter)
            gradient[parameter == 0] = 0
            gradient.masked_fill_(gradient == 0, 0.0)
            assert gradient.isfinite().all()
            assert (gradient == parameter).sum() < gradient.numel()
            assert len(torch.where(gradient.isnan())[0]) == 0

    assert train(before_step=prune, autocast=True).findings() == []


def test_a_function_that_the_run_has_imported_by_name_is_torchs_own_afterwards() -> None:
    model, _ = model_and_optimizer()
    auditor = Auditor(1)
    with auditor.watching():
        from torch.nn.utils import clip_grad_norm_

        for x, y in batches():
            mse_loss(model(x), y).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    assert auditor.passes == 1


@pytest.mark.parametrize("clears", [False, True])
def test_scaled_passes_without_a_step_are_a_mistake_of_a_cut_run_only_if_gradients_are_cleared(clears: bool) -> None:
    model, optimizer = model_and_optimizer()
    scaler = scaler_of()
    auditor = Auditor(8)
    with auditor.watching():
        for x, y in batches(12):
            if clears:
                optimizer.zero_grad()
            scaler.scale(mse_loss(model(x), y)).backward()
    assert [finding.rule.name for finding in auditor.findings()] == ["scaled-backward-no-step"] * clears
