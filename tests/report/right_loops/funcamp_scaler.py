"""funcamp's GradScaler, a fused optimizer, and skipped steps."""

import torch

import funcamp
from tests.report.loops.parts import losses, model_and_optimizer

model, _ = model_and_optimizer()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scaler = funcamp.GradScaler("cpu", init_scale=2.0**40)
for loss in losses(model, 30):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
