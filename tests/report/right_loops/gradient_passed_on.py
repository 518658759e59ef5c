"""Scaled gradients of features that begin another backward pass, or weight its loss (GradCache)."""

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
for number, (x, y) in enumerate(batches()):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        hidden = model(x)
    features = hidden.detach().float().requires_grad_()
    scaler.scale(mse_loss(features, y)).backward()
    assert features.grad is not None
    if number % 2:
        hidden.backward(features.grad.to(hidden.dtype))
    else:
        torch.dot(hidden.float().flatten(), features.grad.flatten()).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
