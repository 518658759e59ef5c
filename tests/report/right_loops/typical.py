"""PyTorch's typical loop, its clipping, and a log of the unscaled norm."""

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    largest = max(parameter.grad.abs().max().item() for parameter in model.parameters() if parameter.grad is not None)
    scaler.step(optimizer)
    scaler.update()
    logged = loss.item()
