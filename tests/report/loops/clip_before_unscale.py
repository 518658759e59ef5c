"""Clips scaled gradients (pytorch/examples#1196, Pytorch-UNet#468, icefall#2081)."""

import sys

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for loss in losses(model):
    scaler.scale(loss).backward()
    if right:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # wrong
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
