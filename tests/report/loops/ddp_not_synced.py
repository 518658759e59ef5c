"""Accumulates with DDP, and leaves the last micro-batch in no_sync too: no gradient is summed over ranks."""

import contextlib
import sys

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, one_process, scaler_of

right = "--right" in sys.argv
one_process()
plain_model, optimizer = model_and_optimizer()
model = torch.nn.parallel.DistributedDataParallel(plain_model)
scaler = scaler_of()
for number, (x, y) in enumerate(batches(8)):
    ends_window = number % 2 == 1
    with contextlib.nullcontext() if right and ends_window else model.no_sync():
        with torch.autocast("cpu", torch.float16):
            loss = mse_loss(model(x), y) / 2
        scaler.scale(loss).backward()  # wrong
    if ends_window:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
torch.distributed.destroy_process_group()
