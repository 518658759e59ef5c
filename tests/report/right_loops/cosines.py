"""Cosines of gradients, and their noise over their size, which are free of the scale."""

import torch
from torch.nn.functional import cosine_similarity, mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
weight, bias, *_ = model.parameters()
cosines = []
previous = torch.ones_like(weight)
for x, y in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y)
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
