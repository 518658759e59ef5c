"""Scales a loss in the loop, and again in a helper."""

import sys

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()


def differentiate(loss: torch.Tensor) -> None:
    scaler.scale(loss).backward()  # wrong


for loss in losses(model):
    optimizer.zero_grad()
    differentiate(loss if right else scaler.scale(loss))
    scaler.step(optimizer)
    scaler.update()
