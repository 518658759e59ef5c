"""Unscales after each micro-batch: the next one adds scaled gradients to unscaled ones."""

import contextlib
import sys

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for number, loss in enumerate(losses(model)):
    scaler.scale(loss / 2).backward()
    ends_window = number % 2 == 1
    if ends_window or not right:
        with contextlib.suppress(RuntimeError):  # "already been called"
            scaler.unscale_(optimizer)  # wrong
    if ends_window:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
