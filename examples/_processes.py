"""Shared by the examples on several processes: options, group, parts of a batch, checkpoints."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

#: Number of checkpoints to keep: one more than the last, in case that one is damaged.
KEPT = 2
SIZES = ("batch", "context", "width", "layers", "heads")
POSITIVE = (*SIZES, "steps", "lr", "init_scale", "log_every", "save_every", "timeout")


def make_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Return the options of a program."""
    parser = argparse.ArgumentParser(name, description=(doc or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, default=8, help="windows in a step, of all processes together")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200, help="train up to this step, over all runs")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--init-scale", type=float, default=2.0**24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=20, help="steps from one printed line to the next")
    parser.add_argument("--save-every", type=int, default=50, help="steps from one checkpoint to the next")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="seconds to wait for another process before giving up"
    )
    parser.add_argument("--out", type=Path, default=Path("demo-out", name), help="where checkpoints go, seen by all")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in --out; from the start if it has none"
    )
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """Return the options, if a run can start with them."""
    for name in POSITIVE:
        if not getattr(args, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be positive; got {getattr(args, name)}")
    if args.width % args.heads:
        parser.error(f"--width must be a multiple of --heads; got {args.width} and {args.heads}")
    check_processes(parser, args)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out must be a folder that can be written; got {args.out} ({error.strerror})")
    if not args.resume and newest(args.out):
        parser.error(f"--out must be a folder without checkpoints, or --resume be given; got {args.out}")
    return args


def check_processes(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Reject a batch that cannot be split evenly, and fewer GPUs than processes."""
    world = int(os.environ["WORLD_SIZE"]) if launched() else 1
    if args.batch % world:
        parser.error(f"--batch must be a multiple of the number of processes; got {args.batch} and {world}")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if args.device == "cuda" and torch.cuda.device_count() < local:
        parser.error(f"--device cuda needs a GPU for each of {local} processes; got {torch.cuda.device_count()}")


def launched() -> bool:
    """Return whether torchrun or another launcher started this process."""
    return "RANK" in os.environ


def join(device: str, timeout: float) -> tuple[int, int]:
    """Join the other processes, or form a group of one; return this process's rank and their number."""
    options: dict[str, Any] = {"timeout": datetime.timedelta(seconds=timeout)}
    if device == "cuda":
        options["device_id"] = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(options["device_id"])
    if not launched():
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun keeps one store across restarts (2.11 to 2.15): without a prefix per attempt, the new processes may
        # find the addresses of the previous ones.
        c10d: Any = dist  # stores are untyped re-exports
        store = c10d.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        ranks = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        options |= {"store": c10d.PrefixStore(f"attempt {attempt}", store), **ranks}
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **options)
    return dist.get_rank(), dist.get_world_size()


def leave() -> None:
    """Leave the group when all others do.

    Without the wait a thread of the group may still refer to a tensor when the interpreter ends, which aborts the
    process. With DTensors the threads outlive the group, because DTensor's caches keep it: call `end` then.
    """
    dist.barrier()
    dist.destroy_process_group()


def end() -> NoReturn:
    """End this process at once, without the interpreter's own end, in which threads of a group may abort it.

    A thread that releases a tensor then is ended by CPython 3.13 and older inside of C++ ("terminate called without an
    active exception"); torch 2.11 to 2.15.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def part_of(batch: tuple[Tensor, ...], rank: int, world: int) -> tuple[Tensor, ...]:
    """Return a rank's part of a step's batch; the data is the same for any number of ranks."""
    return tuple(leaf.chunk(world)[rank] for leaf in batch)


def line(step: float, loss: float, scale: float, skipped: float) -> str:
    """Return the text that reports a step."""
    power = f"2^{math.log2(scale):g}" if scale > 0 else "0"
    return f"step {step:.0f}  loss {loss:.3f}  scale {power}  skipped {skipped:.0f}"


def save_checkpoint(out: Path, step: int, saved: dict[str, Any]) -> Path:
    """Write all ranks' parts of a state into a folder, which is renamed when it is complete."""
    from torch.distributed.checkpoint.state_dict_saver import save  # half a second to import

    folder = out / f"step-{step:08}"
    part = folder.with_suffix(".part")
    save(saved, checkpoint_id=part)  # returns when every rank has written, or raises on all
    if dist.get_rank() == 0:
        part.rename(folder)
        for old in whole(out)[:-KEPT]:
            shutil.rmtree(old)
    return folder


def checkpoint_to_resume(out: Path) -> Path | None:
    """Return the newest checkpoint that rank 0 finds; rank 0 also removes incomplete ones."""
    found: list[Path | None] = [None]
    if dist.get_rank() == 0:
        for part in out.glob("step-*.part"):
            shutil.rmtree(part)
        found = [newest(out)]
    dist.broadcast_object_list(found)
    return found[0]


def newest(out: Path) -> Path | None:
    """Return the last complete checkpoint."""
    return max(whole(out), default=None)


def whole(out: Path) -> list[Path]:
    """Return the checkpoints, oldest first."""
    return sorted(path for path in out.glob("step-*") if not path.suffix)
