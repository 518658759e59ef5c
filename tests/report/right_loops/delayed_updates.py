"""A part of the model is stepped in every third iteration, with its last gradient only, and clipped with the rest."""

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

model, _ = model_and_optimizer()
parameters = list(model.parameters())
first = torch.optim.SGD(parameters[:2], lr=0.01)
last = torch.optim.SGD(parameters[2:], lr=0.01)
scaler = scaler_of()
for number, loss in enumerate(losses(model, 12), 1):
    first.zero_grad()
    last.zero_grad()
    loss = loss / 2
    scaler.scale(loss).backward()
    scaler.step(first)
    if number % 3 == 0:
        scaler.unscale_(last)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(last)
    scaler.update()
