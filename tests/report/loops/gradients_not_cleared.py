"""Steps after each micro-batch and clears the gradients only after two."""

import sys

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for number, loss in enumerate(losses(model, 8)):
    scaler.scale(loss / 2).backward()  # wrong
    ends_window = number % 2 == 1
    if ends_window or not right:
        scaler.step(optimizer)
        scaler.update()
    if ends_window:
        optimizer.zero_grad()
