"""Losses that are scaled, and differentiated, from iterators."""

import torch
from torch.nn.functional import l1_loss, mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
for number, (x, y) in enumerate(batches()):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        output = model(x)
        losses = {"square": mse_loss(output, y), "absolute": l1_loss(output, y)}
    if number % 2:
        torch.autograd.backward(list(scaler.scale(losses.values())))
    else:
        torch.autograd.backward(map(scaler.scale, losses.values()))  # type: ignore[arg-type]
    scaler.step(optimizer)
    scaler.update()
