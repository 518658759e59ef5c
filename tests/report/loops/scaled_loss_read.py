"""Logs a loss under the name that was given to the scaled one."""

import sys

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
total = 0.0
for loss in losses(model):
    optimizer.zero_grad()
    scaled = scaler.scale(loss)
    scaled.backward()
    scaler.step(optimizer)
    scaler.update()
    total += (loss if right else scaled).item()  # wrong
