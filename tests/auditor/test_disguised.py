"""Mistakes in other forms than those of the loops, and runs that the auditor ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from funcamp._audit.audit import Auditor
from tests.auditor.loops.parts import batches, model_and_optimizer, scaler_of
from tests.auditor.training import train


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
