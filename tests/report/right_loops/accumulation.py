"""PyTorch's accumulation, with a window that the epoch's end cuts short."""

import torch

from tests.report.loops.parts import batches, loss_of, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
for _ in range(2):
    for number, (x, y) in enumerate(batches(7)):
        loss = loss_of(model, x, y) / 3
        scaler.scale(loss).backward()
        if (number + 1) % 3 == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
