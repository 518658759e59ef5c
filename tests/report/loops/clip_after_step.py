"""Gradients are clipped between scaler.step and scaler.update: no step gets the clipped ones."""

import sys

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if right:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    if not right:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # wrong
    scaler.update()
