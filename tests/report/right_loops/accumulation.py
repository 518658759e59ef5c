"""PyTorch's accumulation, with a window that the epoch's end cuts short; gradients are divided in place of losses."""

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

for is_copied in (False, True):
    for number, (x, y) in enumerate(batches(), 1):
        scaler.scale(loss_of(model, x, y)).backward()
        if number % 3 == 0:
            scaler.unscale_(optimizer)
            for parameter in model.parameters():
                assert parameter.grad is not None
                if is_copied:
                    parameter.grad.copy_(parameter.grad / 3)
                else:
                    parameter.grad = parameter.grad / 3
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
