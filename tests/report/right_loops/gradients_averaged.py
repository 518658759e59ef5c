"""A loop that averages gradients itself: over micro-batches, and over ranks before unscale_. A mask on a gradient."""

import torch

from tests.report.loops.parts import losses, model_and_optimizer, one_process, scaler_of

one_process()
model, optimizer = model_and_optimizer()
weight = next(model.parameters())
mask = torch.eye(8, 4)
scaler = scaler_of()
for number, loss in enumerate(losses(model, 12)):
    scaler.scale(loss).backward()
    assert weight.grad is not None
    weight.grad.mul_(mask)
    if number % 4 == 3:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(4)
            torch.distributed.all_reduce(parameter.grad)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
torch.distributed.destroy_process_group()
