"""Updates once in the step and once more at the end of it. torch raises (neosr#9)."""

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
        scaler.update()  # wrong
