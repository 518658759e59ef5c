"""A small training loop under the auditor, with gaps for mistakes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from funcamp.report.audit import Auditor
from tests.report.loops.parts import batches, model_and_optimizer, scaler_of


def do_nothing(*_: object) -> None:
    pass


def train(
    *,
    prepare: Callable[[nn.Module], object] = do_nothing,
    autocast: bool = False,
    loss_of: Callable[[Tensor, Tensor], Tensor] = mse_loss,
    before_step: Callable[[nn.Module], object] = do_nothing,
    change: Callable[[Tensor, Tensor], Tensor] | None = None,
    init_scale: float = 2.0**10,
    window: int = 1,
    passes: int = 6,
    limit: int | None = None,
) -> Auditor:
    """Train with a scaler, and return the auditor.

    prepare: is called with the model before the first pass.
    autocast: whether the forward pass runs in float16.
    loss_of: the loss of outputs and targets.
    before_step: is called with the model between each backward pass and the step.
    change: is called there with each parameter and its gradient; what it returns replaces the gradient.
    window: the number of micro-batches of a step.
    limit: after so many passes the auditor ends the run.
    """
    auditor = Auditor(limit)
    with auditor.watching():
        model, optimizer = model_and_optimizer()
        prepare(model)
        scaler = scaler_of(init_scale)
        for number, (x, y) in enumerate(batches(passes), 1):
            with torch.autocast("cpu", torch.float16, enabled=autocast):
                loss = loss_of(model(x), y)
            scaler.scale(loss).backward()
            before_step(model)
            if change is not None:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad = change(parameter, parameter.grad)
            if number % window == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return auditor


def names(auditor: Auditor) -> list[str]:
    return [finding.rule.name for finding in auditor.findings()]
