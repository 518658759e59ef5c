"""Logs the norm of scaled gradients, and the scale, which is no factor: another number of that name is one."""

import sys
from types import SimpleNamespace

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
sum_of_scales = 0.0
options = SimpleNamespace(scale=0.5)
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss * options.scale).backward()
    if right:
        scaler.unscale_(optimizer)
    squares = 0.0
    for parameter in model.parameters():
        if parameter.grad is not None:
            squares += parameter.grad.norm(2).item() ** 2  # wrong
    norm = squares**0.5
    scale = scaler.get_scale()
    sum_of_scales += scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
