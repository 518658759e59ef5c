"""The optimizer steps once more after scaler.step, as after a branch for float32."""

import sys

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if not right:
        optimizer.step()  # wrong
