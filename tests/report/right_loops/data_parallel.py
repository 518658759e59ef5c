"""DDP, with accumulation, and gradients that the loop averages before the step."""

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

for loss in losses(plain_model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    for parameter in plain_model.parameters():
        if parameter.grad is not None:
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= torch.distributed.get_world_size()
    scaler.step(optimizer)
    scaler.update()
torch.distributed.destroy_process_group()
