"""Resumes the optimizer and not the scaler."""

import io
import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
file = io.BytesIO()
momentum = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
torch.save(momentum, file)
file.seek(0)

loaded = torch.load(file)
model.load_state_dict(loaded["model"])
optimizer.load_state_dict(loaded["optimizer"])  # wrong
if right:
    scaler.load_state_dict(loaded["scaler"])
for x, y in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
