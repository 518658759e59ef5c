"""Train a byte-level GPT in float16 with FSDP2, with checkpoints that survive a kill.

    torchrun --standalone --nproc-per-node 2 examples/train_fsdp2.py
    torchrun --standalone --nproc-per-node 4 examples/train_fsdp2.py --resume     resume on more or fewer

The loop is the one for torch.amp.GradScaler; `unscale_` shares an overflow of one process with all, so every process
skips and scales in the same way. Watch the scale: the first steps overflow, and each halves it.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _gpt import GPT, batch_at, load_bytes
from _processes import check, checkpoint_to_resume, end, join, leave, line, make_parser, part_of, save_checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import funcamp

# The logits are a view; the loop writes nothing into them.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)


def make_model(args: argparse.Namespace, world: int) -> nn.Module:
    """Return the GPT, sharded over the processes by block; each block is gathered when it is needed."""
    torch.manual_seed(args.seed)
    model = GPT(args.context, args.width, args.layers, args.heads).to(args.device)
    mesh = init_device_mesh(args.device, (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Run:
    """The contents of a checkpoint."""

    def __init__(self, args: argparse.Namespace, world: int) -> None:
        self.model = make_model(args, world)
        # The fused kernel skips itself: no host read, and its moments exist after the first step, even a skipped one.
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.1, fused=True
        )
        self.scaler = funcamp.GradScaler(args.device, init_scale=args.init_scale, growth_interval=50)
        self.taken, self.skipped = 0, torch.zeros((), device=args.device)

    def state_dict(self) -> dict[str, Any]:
        """Return everything, parameters and moments as DTensors, for any number of processes."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "scaler": self.scaler.state_dict(),
            "taken": self.taken,
            "skipped": self.skipped,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        set_state_dict(self.model, self.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        self.scaler.load_state_dict(saved["scaler"])
        self.taken, self.skipped = saved["taken"], saved["skipped"]

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Take one step of the loop; return the loss of this process's part of the batch."""
        with torch.autocast(self.skipped.device.type, torch.float16):
            logits = self.model(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.taken += 1
        self.skipped += self.scaler.metrics().found_inf
        return loss.detach()


def train(args: argparse.Namespace) -> dict[str, float]:
    """Train in the current group, and return the last numbers."""
    rank, world = dist.get_rank(), dist.get_world_size()
    text, _ = load_bytes()
    run, folder = Run(args, world), checkpoint_to_resume(args.out)
    if folder is not None:
        saved = run.state_dict()
        load(saved, checkpoint_id=folder)
        run.load_state_dict(saved)
    if rank == 0:
        print(f"processes {world}, from step {run.taken}", flush=True)
    last: dict[str, float] = {}
    while run.taken < args.steps:
        batch = part_of(batch_at(text, run.taken, args.seed, args.batch, args.context, "cpu"), rank, world)
        scale = run.scaler.metrics().scale
        loss = run.step(*(leaf.to(args.device, non_blocking=True) for leaf in batch))
        if run.taken % args.log_every == 0 or run.taken == args.steps:  # the following lines wait for the device
            dist.all_reduce(loss)
            last = {"loss": loss.item() / world, "scale": scale.item(), "skipped": run.skipped.item()}
            if rank == 0:
                print(line(run.taken, **last), flush=True)
        if run.taken % args.save_every == 0 or run.taken == args.steps:
            save_checkpoint(args.out, run.taken, run.state_dict())
    return {"step": run.taken, **last}


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Join the other processes and train."""
    parser = make_parser("train_fsdp2", __doc__)
    args = check(parser, parser.parse_args(argv))
    join(args.device, args.timeout)
    last = train(args)
    leave()
    return last


if __name__ == "__main__":
    main()
    end()
