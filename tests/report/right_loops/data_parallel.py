"""DDP, with accumulation; then a loop that averages gradients itself, over micro-batches and ranks."""

import contextlib

import torch

from tests.report.loops.parts import losses, model_and_optimizer, one_process, scaler_of

one_process()
plain_model, optimizer = model_and_optimizer()
model = torch.nn.parallel.DistributedDataParallel(plain_model)
scaler = scaler_of()
for number, loss in enumerate(losses(model, 8)):
    ends_window = number % 2 == 1
    with contextlib.nullcontext() if ends_window else model.no_sync():
        loss = loss / 2
        scaler.scale(loss).backward()
    if ends_window:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

for number, loss in enumerate(losses(plain_model, 8)):
    scaler.scale(loss).backward()
    if number % 2:
        for parameter in plain_model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(2)
            torch.distributed.all_reduce(parameter.grad)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(plain_model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
torch.distributed.destroy_process_group()
