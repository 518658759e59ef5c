"""Cross-validation: for each fold a new model, a new optimizer and a new scaler."""

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

for _ in range(3):
    model, optimizer = model_and_optimizer()
    scaler = scaler_of()
    for x, y in batches(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
