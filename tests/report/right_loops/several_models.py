"""PyTorch's several models, losses and optimizers."""

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

models, optimizers = zip(*[model_and_optimizer() for _ in range(2)])
scaler = scaler_of()
for x, y in batches():
    for optimizer in optimizers:
        optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        outputs = [model(x) for model in models]
        first_loss = mse_loss(2 * outputs[0] + 3 * outputs[1], y)
        second_loss = mse_loss(3 * outputs[0] - 5 * outputs[1], y)
    scaler.scale(first_loss).backward(retain_graph=True)
    scaler.scale(second_loss).backward()
    scaler.unscale_(optimizers[0])
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
