"""funcamp's GradScaler, a fused optimizer, and skipped steps."""

import torch
from torch.nn.functional import mse_loss

import funcamp
from tests.report.loops.parts import batches, model_and_optimizer

model, _ = model_and_optimizer()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scaler = funcamp.GradScaler("cpu", init_scale=2.0**40)
for x, y in batches(30):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
