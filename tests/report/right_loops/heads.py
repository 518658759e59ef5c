"""The sum of the mean losses of three domains, each with a head of its own."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, scaler_of

torch.manual_seed(0)
body, heads = nn.Linear(4, 8), nn.ModuleList([nn.Linear(8, 1) for _ in range(3)])
optimizer = torch.optim.SGD([*body.parameters(), *heads.parameters()], lr=0.01)
scaler = scaler_of()
for _ in range(3):
    optimizer.zero_grad()
    for head, (x, y) in zip(heads, batches(3)):
        with torch.autocast("cpu", torch.float16):
            loss = mse_loss(head(body(x)), y)
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
