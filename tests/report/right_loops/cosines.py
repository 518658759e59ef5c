"""Cosines of gradients, and their noise over their size, which are free of the scale."""

import torch
from torch.nn.functional import cosine_similarity

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
weight, bias, *_ = model.parameters()
cosines = []
previous = torch.ones_like(weight)
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    gradient = weight.grad
    assert gradient is not None
    flat = gradient.flatten()
    cosines.append(torch.dot(flat, previous.flatten()) / (flat.norm() * previous.norm() + 1e-12))
    cosines.append((gradient * previous).sum() / gradient.pow(2).sum().sqrt())
    cosines.append(cosine_similarity(gradient, previous, dim=0).mean())
    cosines.append(gradient.std() / gradient.abs().mean())
    unscaled_norm = gradient.norm() / scaler.get_scale()
    cosines.append(unscaled_norm)
    largest = max(cosine.item() for cosine in cosines)
    previous = gradient.clone()
    scaler.step(optimizer)
    scaler.update()
    scaler.get_scale()
