"""Skips a step by hand and leaves out the update: the next unscale_ raises (LVSM#19)."""

import sys

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for number, loss in enumerate(losses(model)):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # wrong
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    is_too_large = number == 2
    if not is_too_large:
        scaler.step(optimizer)
    if right or not is_too_large:
        scaler.update()
