"""Updates after each of two optimizers: the second unscales by another scale."""

import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
head, head_optimizer = model_and_optimizer()
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
for x, y in batches():
    optimizer.zero_grad()
    head_optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y) + mse_loss(head(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    if not right:
        scaler.update()
    scaler.step(head_optimizer)  # wrong
    scaler.update()
