"""Copies of gradients: unscaled by the loop, and kept until the next backward pass."""

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
weight = next(model.parameters())
kept = torch.zeros_like(weight)
norms = []
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    flat.div_(2.0**10)
    norms += [flat.norm().item(), kept.norm().item()]
    scaler.unscale_(optimizer)
    assert weight.grad is not None
    kept = weight.grad.clone()
    scaler.step(optimizer)
    scaler.update()
