"""Scales two losses by a scaler each, and steps both optimizers by one of them."""

import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
head, head_optimizer = model_and_optimizer()
scaler, head_scaler = scaler_of(), scaler_of(2.0**14)
for x, y in batches():
    optimizer.zero_grad()
    head_optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss, head_loss = mse_loss(model(x), y), mse_loss(head(x), y)
    scaler.scale(loss).backward()
    head_scaler.scale(head_loss).backward()
    (scaler if right else head_scaler).step(optimizer)  # wrong
    head_scaler.step(head_optimizer)
    if right:
        scaler.update()
    head_scaler.update()
