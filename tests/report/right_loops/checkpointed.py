"""Checkpointing of both kinds, a compiled model, an evaluation, a mask of -inf."""

import torch
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
compiled = torch.compile(model)
scaler = scaler_of()
future = torch.triu(torch.ones(3, 3, dtype=torch.bool), diagonal=1)
for number, (x, y) in enumerate(batches()):
    model.train()
    optimizer.zero_grad()
    x.requires_grad_()
    with torch.autocast("cpu", torch.float16):
        outputs = checkpoint(model, x, use_reentrant=number % 2 == 0)
        scores = (outputs @ outputs.T).masked_fill(future, -torch.inf)
        attended = scores.softmax(-1) @ compiled(x)
        loss = mse_loss(attended, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        validation_loss = mse_loss(model(x), y).item()
