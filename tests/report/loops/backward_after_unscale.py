"""Sharpness-aware steps: the second gradients are stepped with as the first ones were unscaled."""

import sys

import torch

from tests.report.loops.parts import batches, loss_of, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for x, y in batches():
    optimizer.zero_grad()
    loss = loss_of(model, x, y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    moves = [0.01 * parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    with torch.no_grad():
        torch._foreach_add_(list(model.parameters()), moves)
    optimizer.zero_grad()
    if right:
        scaler.update()
    loss = loss_of(model, x, y)
    scaler.scale(loss).backward()  # wrong
    with torch.no_grad():
        torch._foreach_sub_(list(model.parameters()), moves)
    scaler.step(optimizer)
    scaler.update()
