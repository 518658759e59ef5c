"""Several losses of one batch, differentiated by one line."""

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
for x, y in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        output = model(x)
        losses = [mse_loss(output, y), mse_loss(output, y / 2)]
    for number, loss in enumerate(losses):
        scaler.scale(loss).backward(retain_graph=number == 0)
    scaler.step(optimizer)
    scaler.update()
