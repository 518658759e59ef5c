"""FSDP with its own scaler, whose class the script imports, on one process."""

import warnings

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from tests.report.loops.parts import losses, model_and_optimizer, one_process

one_process()
plain, _ = model_and_optimizer()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of a single process, which shards nothing
    model = FullyShardedDataParallel(plain, device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scaler = ShardedGradScaler("cpu", init_scale=2.0**10)
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    model.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()
torch.distributed.destroy_process_group()
