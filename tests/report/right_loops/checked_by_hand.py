"""A loop that unscales by the scaler, looks for inf itself, and steps or applies the gradients without it."""

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, gradients_of, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
for number, (x, y) in enumerate(batches()):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y)
        penalty = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
        scaler.scale(1e-4 * penalty).backward()  # its forward pass has nothing that autocast runs in 16 bits
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if number % 2:
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients_of(model)):
                parameter.sub_(gradient, alpha=0.01)
    elif torch.isfinite(norm):
        optimizer.step()
    scaler.update()
