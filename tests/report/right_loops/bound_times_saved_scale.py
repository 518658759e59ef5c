"""Clips scaled gradients to a bound that is times the scale, which is read from the scaler's state."""

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scale = scaler.state_dict()["scale"]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 * scale)
    scaler.step(optimizer)
    scaler.update()
