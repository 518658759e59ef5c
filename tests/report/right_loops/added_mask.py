"""Scores of attention, and a mask of the smallest number that is added."""

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
key = torch.nn.Linear(4, 4)
scaler = scaler_of()
mask = torch.zeros(3, 3, dtype=torch.float16)
mask[:, 2] = torch.finfo(torch.float16).min
for x, y in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        scores = key(x) @ key(x).T - 100
        assert (scores + mask).isinf().any()
        loss = mse_loss(model((scores + mask).softmax(-1) @ x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
