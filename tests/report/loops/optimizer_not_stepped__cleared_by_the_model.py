"""Forgets the step of the second optimizer, whose gradients the model clears."""

import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, scaler_of

right = "--right" in sys.argv
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in model]
scaler = scaler_of()
for x, y in batches():
    model.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y)
    scaler.scale(loss).backward()  # wrong
    for optimizer in optimizers if right else optimizers[:1]:
        scaler.step(optimizer)
    scaler.update()
