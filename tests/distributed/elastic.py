"""Sharded states that processes write, read or only hold: `-m tests.distributed.elastic write|read|leave FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree

from funcamp import distributed
from tests.support.helpers import assert_same
from tests.support.programs import import_example

TINY = ["--width=16", "--layers=1", "--heads=2", "--context=16", "--batch=4", "--save-every=4", "--log-every=2"]
STEPS = 12

example = import_example("train_ddp")


def options(folder: Path, *others: str) -> Any:
    """The program's, for a run from a scale that overflows and is found."""
    return example.parse([*TINY, f"--init-scale={2**19}", f"--out={folder}", *others])


def gathered(state: Any) -> list[torch.Tensor]:
    """Every tensor of the state that one process alone would hold."""
    return [leaf for leaf in _pytree.tree_leaves(distributed.gather_state(state)) if leaf is not None]


def write(folder: Path) -> None:
    """Train, sharded and not; leave a checkpoint and, beside it, the state as it was."""
    text, _ = example.load_bytes()
    for flag in ([], ["--shard"]):
        args = options(folder / f"run{len(flag)}", *flag)
        step = example.make_step(args)
        state = step.init()
        for number in range(STEPS):
            batch = example.batch_at(text, number, args.seed, args.batch, args.context, "cpu")
            state, _ = step(state, example.part_of(batch, dist.get_rank(), dist.get_world_size()))
        assert 0 < state.skipped < STEPS
        example.save_checkpoint(args.out, STEPS, distributed.sharded_state_dict(state))
        whole = gathered(state)
        if dist.get_rank() == 0:
            torch.save(whole, args.out / "whole.pt")


def read(folder: Path) -> None:
    """Load each checkpoint, sharded and not; compare on every rank, then train on."""
    for run in ("run0", "run1"):
        expected = torch.load(folder / run / "whole.pt")
        for flag in ([], ["--shard"]):
            args = options(folder / run, "--resume", f"--steps={STEPS + 2}", *flag)
            step = example.make_step(args)
            assert_same(gathered(example.load_checkpoint(step, args)), expected)
        assert example.train(args)["step"] == STEPS + 2


def threads() -> int:
    """The number of this process's threads that run collectives."""
    return [path.read_text() for path in Path("/proc/self/task").glob("*/comm")].count("pt_gloo_runloop\n")


class Kept(dict[str, Any]):
    """Cannot be cleared."""

    def clear(self) -> None: ...


def keep_group(mesh: Any) -> Any:
    mesh._pg_registry = Kept(mesh._pg_registry)
    return mesh


def leave(folder: Path) -> None:
    """Print how many threads a group has while a sharded state refers to it, and when it is destroyed."""
    if sys.argv[3:] == ["without the workaround"]:
        of_group = DeviceMesh.from_group
        DeviceMesh.from_group = lambda *args: keep_group(of_group(*args))  # type: ignore[method-assign]
    args = options(folder, "--shard")
    saved = distributed.sharded_state_dict(example.load_checkpoint(example.make_step(args), args))
    for leaf in saved.values():
        torch.equal(leaf, leaf)
    del leaf, saved
    found = threads()
    example.leave()
    sys.stdout.write(f"threads {found}, then {threads()}\n")


if __name__ == "__main__":
    example.join("cpu", 120)
    {"write": write, "read": read, "leave": leave}[sys.argv[1]](Path(sys.argv[2]))
    if dist.is_initialized():
        example.leave()
