"""Unscales after each micro-batch: the next one adds scaled gradients to unscaled ones."""

import contextlib
import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for number, (x, y) in enumerate(batches()):
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y)
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
