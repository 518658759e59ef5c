"""Adds the gradients of four micro-batches and does not divide the mean loss by four."""

import sys

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for number, loss in enumerate(losses(model, 12)):
    if right:
        loss = loss / 4
    scaler.scale(loss).backward()  # wrong
    if number % 4 == 3:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
