"""Steps with one scaler and updates the other (a GAN with two scalers)."""

import sys

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
other = scaler_of()
for loss in losses(model):
    optimizer.zero_grad()
    other.scale(loss.detach())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    if right:
        scaler.update()
    else:
        other.update()  # wrong
