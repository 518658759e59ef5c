"""Contrastive learning: features of length 1, by torch's function with its own epsilon, which float16 does not have."""

import torch
from torch.nn.functional import cross_entropy, normalize

from tests.report.loops.parts import batches, scaler_of

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = scaler_of()
for x, _ in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        first, second = normalize(model(x), dim=1), normalize(model(x + 0.1 * torch.randn_like(x)), dim=1)
        loss = cross_entropy(10 * first @ second.T, torch.arange(3))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
