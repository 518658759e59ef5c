"""Logs the norm of scaled gradients."""

import sys

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if right:
        scaler.unscale_(optimizer)
    squares = 0.0
    for parameter in model.parameters():
        if parameter.grad is not None:
            squares += parameter.grad.norm(2).item() ** 2  # wrong
    norm = squares**0.5
    scaler.step(optimizer)
    scaler.update()
