"""Sums gradients over ranks after unscale_: each rank saw only its own overflow."""

import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, one_process, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
one_process()
for x, y in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y)
    scaler.scale(loss).backward()
    if not right:
        scaler.unscale_(optimizer)
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)  # wrong
    scaler.step(optimizer)
    scaler.update()
torch.distributed.destroy_process_group()
