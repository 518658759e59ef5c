"""Train a byte-level GPT in float16, data parallel, with checkpoints that survive a kill.

    torchrun --standalone --nproc-per-node 2 examples/train_ddp.py
    torchrun --standalone --nproc-per-node 2 examples/train_ddp.py --shard      each process keeps a part of the state
    torchrun --standalone --nproc-per-node 4 examples/train_ddp.py --resume     resume on more or fewer, sharded or not
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train_ddp.py --resume

The last form restarts all processes if one dies, and they resume from the newest checkpoint. Watch the scale: the
first steps overflow, on one process or on all, and every process skips the same steps.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _gpt import GPT, batch_at, load_bytes
from _processes import check, checkpoint_to_resume, end, join, leave, line, make_parser, part_of, save_checkpoint
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

import funcamp
from funcamp import distributed


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean, in nats per byte."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def make_step(args: argparse.Namespace) -> funcamp.TrainStep:
    """Return the training step of all processes."""
    torch.manual_seed(args.seed)
    model = GPT(args.context, args.width, args.layers, args.heads).to(args.device)
    adamw = funcamp.stateless(torch.optim.AdamW, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.1)
    return funcamp.make_train_step(
        funcamp.module_loss(model, cross_entropy),
        adamw,
        funcamp.ScalerConfig(init_scale=args.init_scale, growth_interval=50),
        policy="float16",
        max_norm=1.0,
        parallel=distributed.DataParallel(shard=args.shard),
    )


def load_checkpoint(step: funcamp.TrainStep, args: argparse.Namespace) -> funcamp.TrainState:
    """Return the state of the newest checkpoint, from any number of processes, or the first state."""
    state, folder = step.init(), checkpoint_to_resume(args.out)
    if folder is None:
        return state
    saved = distributed.sharded_state_dict(state)
    load(saved, checkpoint_id=folder)
    return distributed.load_sharded_state_dict(saved, state)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the checked options."""
    parser = make_parser("train_ddp", __doc__)
    parser.add_argument("--shard", action="store_true", help="each process stores a part of parameters and moments")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on a GPU only")
    args = check(parser, parser.parse_args(argv))
    if args.compile is None:
        args.compile = args.device == "cuda"
    return args


def train(args: argparse.Namespace) -> dict[str, float]:
    """Train in the current group, and return the last numbers."""
    rank, world = dist.get_rank(), dist.get_world_size()
    text, _ = load_bytes()
    step = make_step(args)
    state = load_checkpoint(step, args)
    compiled = funcamp.jit(step) if args.compile else None
    run = compiled or step
    first = int(state.step)
    if rank == 0:
        print(f"processes {world}, from step {first}", flush=True)
    last: dict[str, float] = {}
    reader = funcamp.MetricReader()

    def log(rows: list[funcamp.Metrics]) -> None:
        for row in rows:
            number = int(row.applied + row.skipped)
            last.update(step=number, loss=float(row.loss), scale=float(row.scale), skipped=float(row.skipped))
            if rank == 0 and (number % args.log_every == 0 or number == args.steps):
                print(line(**last), flush=True)

    for number in range(first, args.steps):
        batch = part_of(batch_at(text, number, args.seed, args.batch, args.context, "cpu"), rank, world)
        state, metrics = run(state, tuple(leaf.to(args.device, non_blocking=True) for leaf in batch))
        reader.put(metrics)
        log(reader.ready())
        if (number + 1) % args.save_every == 0 or number + 1 == args.steps:
            save_checkpoint(args.out, number + 1, distributed.sharded_state_dict(state))
    log(reader.drain())
    if compiled is not None:
        compiled.release()  # NCCL's group does not end while a CUDA graph that contains its collectives exists
    return last


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Join the other processes and train."""
    args = parse(argv)
    join(args.device, args.timeout)
    last = train(args)
    leave()
    return last


if __name__ == "__main__":
    main()
    end()
