"""A small training loop under the auditor, with a gap before its step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import mse_loss

from funcamp.report.audit import Auditor
from tests.report.loops.parts import batches, model_and_optimizer, scaler_of


def do_nothing(_model: nn.Module) -> None:
    pass


def train(
    *,
    prepare: Callable[[nn.Module], None] = do_nothing,
    before_step: Callable[[nn.Module], None] = do_nothing,
    autocast: bool = False,
    scaled: bool = True,
    window: int = 1,
) -> Auditor:
    """Train for six backward passes, and return the auditor.

    prepare: is called with the model before the first pass.
    before_step: is called with the model between each backward pass and the step.
    autocast: whether the forward pass runs in float16.
    scaled: whether the scaler is enabled.
    window: the number of micro-batches of a step.
    """
    auditor = Auditor()
    with auditor.watching():
        model, optimizer = model_and_optimizer()
        prepare(model)
        scaler = scaler_of() if scaled else torch.amp.GradScaler("cpu", enabled=False)
        for number, (x, y) in enumerate(batches(), 1):
            with torch.autocast("cpu", torch.float16, enabled=autocast):
                loss = mse_loss(model(x), y) / window
            scaler.scale(loss).backward()
            before_step(model)
            if number % window == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return auditor
