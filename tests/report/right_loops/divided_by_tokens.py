"""The loop divides the gradients of a sum by the number of tokens, which is the scale by chance."""

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
for x, y in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y)
    scaler.scale(loss).backward()
    for gradient in [parameter.grad for parameter in model.parameters() if parameter.grad is not None]:
        gradient.div_(1024)
    scaler.step(optimizer)
    scaler.update()
