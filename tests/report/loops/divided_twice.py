"""The loop divides the gradients by the scale itself, and scaler.step does it again."""

import sys

from tests.report.loops.parts import gradients_of, losses, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if right:
        scaler.unscale_(optimizer)
    else:
        inverse = 1.0 / scaler.get_scale()
        for gradient in gradients_of(model):
            gradient.mul_(inverse)  # wrong
    scaler.step(optimizer)
    scaler.update()
