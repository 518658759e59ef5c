"""A part of the model is stepped in every third iteration, with its last gradient only, and clipped with the rest."""

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

model, _ = model_and_optimizer()
parameters = list(model.parameters())
first = torch.optim.SGD(parameters[:2], lr=0.01)
last = torch.optim.SGD(parameters[2:], lr=0.01)
scaler = scaler_of()
for number, (x, y) in enumerate(batches(12), 1):
    first.zero_grad()
    last.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y) / 2
    scaler.scale(loss).backward()
    scaler.step(first)
    if number % 3 == 0:
        scaler.unscale_(last)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(last)
    scaler.update()
