"""Clears the gradients between backward and step."""

import sys

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for loss in losses(model):
    if right:
        optimizer.zero_grad()
    scaler.scale(loss).backward()
    if not right:
        optimizer.zero_grad(set_to_none=False)  # wrong
    scaler.step(optimizer)
    scaler.update()
