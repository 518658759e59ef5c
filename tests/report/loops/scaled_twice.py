"""Scales a loss in the loop, and again in a helper."""

import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()


def differentiate(loss: torch.Tensor) -> None:
    scaler.scale(loss).backward()  # wrong


for x, y in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y)
    differentiate(loss if right else scaler.scale(loss))
    scaler.step(optimizer)
    scaler.update()
