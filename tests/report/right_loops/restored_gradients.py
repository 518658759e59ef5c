"""Gradients of two losses that are kept, cleared and written back."""

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, gradients_of, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
for x, y in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        outputs = model(x)
        losses = [mse_loss(outputs, y), outputs.abs().mean()]
    kept = []
    for loss in losses:
        scaler.scale(loss).backward(retain_graph=True)
        kept.append([gradient.clone() for gradient in gradients_of(model)])
        optimizer.zero_grad(set_to_none=False)
    for gradient, first, second in zip(gradients_of(model), *kept):
        gradient.copy_(0.5 * first + 0.5 * second)
    scaler.step(optimizer)
    scaler.update()
