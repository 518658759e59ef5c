"""A first scale that is much too high: the first steps are skipped, and the run ends soon after."""

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of(init_scale=2.0**32)
for x, y in batches(10):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
