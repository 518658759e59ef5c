"""Starts from a parameter that is not finite: each step is skipped."""

import sys

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
if not right:
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()  # wrong
    scaler.step(optimizer)
    scaler.update()
