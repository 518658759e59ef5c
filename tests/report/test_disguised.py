"""Mistakes in other forms than those of the loops, and runs that the auditor ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from funcamp.report.audit import Auditor
from tests.report.loops.parts import batches, gradients_of, model_and_optimizer, scaler_of
from tests.report.training import names, train


def bounded(gradient: Tensor) -> Tensor:
    return torch.minimum(gradient, torch.tensor(0.1))


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


CLIP, READ, REPLACED = "clip-before-unscale", "read-before-unscale", "overflow-replaced"
#: What is done to the gradients of a model before its step.
OF_MODEL: list[tuple[str, Callable[[nn.Module], object]]] = [
    (CLIP, lambda model: torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(10.0))),
    (CLIP, mask_and_clip),
    (CLIP, average_and_clip),
    (READ, lambda model: max(gradient.abs().max() for gradient in gradients_of(model)) < 6e4),
    (READ, lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item()),
    (READ, multiply_by_coefficient),
    (READ, lambda model: gradients_of(model)[0].norm().item() > 0.5),
    (READ, multiply_if_below_1),
]
#: What takes the place of each gradient.
OF_GRADIENT: list[tuple[str, Callable[[Tensor, Tensor], Tensor]]] = [
    (CLIP, lambda _, gradient: gradient.clamp(-1, 1)),
    (READ, lambda _, gradient: torch.where(gradient.abs() > 0.5, 0.5 * gradient.sign(), gradient)),
    (REPLACED, lambda _, gradient: gradient.index_put_((~torch.isfinite(gradient),), torch.tensor(0.0))),
    (REPLACED, lambda _, gradient: gradient.masked_fill_(gradient.isnan() | gradient.isinf(), 0.0)),
    (REPLACED, lambda _, gradient: torch.where(torch.isfinite(gradient), gradient, torch.zeros_like(gradient))),
    (REPLACED, lambda _, gradient: torch.nan_to_num(gradient).clone()),
]


def assert_named(rule: str, mistake: Callable[..., object], auditor: Auditor) -> None:
    findings = auditor.findings()
    assert {finding.rule.name for finding in findings} == {rule}
    assert len(findings) == 1 or rule == READ
    first_line = mistake.__code__.co_firstlineno
    assert all(first_line <= finding.line.number < first_line + 5 for finding in findings)


@pytest.mark.parametrize(("rule", "mistake"), OF_MODEL)
def test_a_mistake_on_the_gradients_of_a_model_is_named(rule: str, mistake: Callable[[nn.Module], object]) -> None:
    assert_named(rule, mistake, train(before_step=mistake, autocast=True))


@pytest.mark.parametrize(("rule", "mistake"), OF_GRADIENT)
def test_a_mistake_on_each_gradient_is_named(rule: str, mistake: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert_named(rule, mistake, train(change=mistake, autocast=True))


def test_a_bound_by_another_tensor_is_a_clipping() -> None:
    (finding,) = train(change=lambda _, gradient: bounded(gradient), autocast=True).findings()
    assert (finding.rule.name, finding.line.text) == (CLIP, "return torch.minimum(gradient, torch.tensor(0.1))")


def test_a_step_by_hand_adds_nothing_to_gradients() -> None:
    def move(model: nn.Module) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data -= 1e-6 * parameter.grad

    assert names(train(before_step=move, autocast=True)) == []


@pytest.mark.parametrize("name", ["nan_to_num", "nan_to_num_"])
def test_a_hook_that_replaces_inf_is_named(name: str) -> None:
    def register(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: getattr(gradient, name)(0.0))

    (finding,) = train(prepare=register, autocast=True).findings()
    assert finding.rule.name == REPLACED
    assert "getattr(gradient, name)(0.0)" in finding.line.text


def test_other_masks_replace_no_overflow() -> None:
    def prune(parameter: Tensor, gradient: Tensor) -> Tensor:
        gradient[parameter == 0] = 0
        gradient.masked_fill_(gradient == 0, 0.0)
        assert gradient.isfinite().all()
        assert (gradient == parameter).sum() < gradient.numel()
        assert len(torch.where(gradient.isnan())[0]) == 0
        return gradient

    assert names(train(change=prune, autocast=True)) == []


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
    assert names(auditor) == ["scaled-backward-no-step"] * clears
