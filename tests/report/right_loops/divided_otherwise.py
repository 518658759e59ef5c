"""Accumulation whose losses are divided by the initial gradient, or before their mean."""

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, loss_of, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
micro_batches = 3
for number, (x, y) in enumerate(batches(12), 1):
    if number <= 6:
        loss = loss_of(model, x, y)
        scaler.scale(loss).backward(gradient=torch.tensor(1 / micro_batches))
    else:
        with torch.autocast("cpu", torch.float16):
            losses = mse_loss(model(x), y, reduction="none") / micro_batches
        scaler.scale(losses.mean()).backward()
    if number % micro_batches == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
