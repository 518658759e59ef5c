"""The scaler is updated in each micro-batch of a window, also without a step."""

import sys

from tests.report.loops.parts import batches, loss_of, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for number, (x, y) in enumerate(batches(), 1):
    loss = loss_of(model, x, y) / 2
    scaler.scale(loss).backward()
    if number % 2 == 0:
        scaler.step(optimizer)
        optimizer.zero_grad()
    if number % 2 == 0 or not right:
        scaler.update()  # wrong
