"""Loops that unscale by the scaler, look for inf themselves, and step or apply the gradients without it."""

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, gradients_of, losses, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
for x, y in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y)
        penalty = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
        scaler.scale(1e-4 * penalty).backward()  # its forward pass has nothing that autocast runs in 16 bits
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        optimizer.step()
    scaler.update()

for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    if all(torch.isfinite(gradient).all() for gradient in gradients_of(model)):
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients_of(model)):
                parameter.sub_(gradient, alpha=0.01)
    scaler.update()
