"""What the files in `checkpoints` hold. They were written before `save` became `torch.save` and a rename (2026-11).

python -m tests.io.old_checkpoints folder       writes the same again, with the present code
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as checkpoint_module
from torch.multiprocessing.spawn import spawn

import funcamp
from funcamp import distributed

dcp: Any = checkpoint_module  # its functions are untyped re-exports

FOLDER = Path(__file__).parent / "checkpoints"
#: Entries beside the state, one of each kind that a user saves.
BESIDE = {
    "rng": torch.arange(3, dtype=torch.uint8),
    "history": [1, 2.5, None, True, "text", b"bytes", (1, [2])],
    "about": {3: torch.float16, "shape": torch.Size([2]), "device": torch.device("cpu")},
}
RANKS = 2


def make(parallel: distributed.DataParallel | None = None) -> funcamp.TrainStep:
    """Return a step whose numbers are sums of few powers of two, hence the same on every machine."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(1.0, 1 + parameter.numel()).view_as(parameter))
    return funcamp.make_train_step(
        funcamp.module_loss(model, lambda output, target: (output * target).mean()),
        funcamp.stateless(torch.optim.SGD, lr=0.5, momentum=0.5),
        funcamp.ScalerConfig(init_scale=8.0, growth_interval=2),
        policy="float16",
        ema_decay=0.5,
        parallel=parallel,
    )


def train(step: funcamp.TrainStep, state: funcamp.TrainState, count: int) -> funcamp.TrainState:
    for _ in range(count):
        state, _ = step(state, (torch.ones(2, 2), torch.ones(2, 1)))
    return state


@contextmanager
def process_group(store: Any, rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def write_sharded(rank: int, folder: str, rendezvous: str) -> None:
    with process_group(dist.FileStore(rendezvous, RANKS), rank, RANKS):  # type: ignore[attr-defined]
        step = make(distributed.DataParallel(shard=True))
        state = train(step, step.init(), 3)
        dcp.save(distributed.sharded_state_dict(state), checkpoint_id=f"{folder}/sharded")


def write_all(folder: Path) -> None:
    step = make()
    saved = step.state_dict(train(step, step.init(), 3))
    funcamp.save({"state": saved} | BESIDE, folder / "nested.pt")
    funcamp.save(saved, folder / "state.pt")
    with tempfile.TemporaryDirectory() as meeting:
        spawn(write_sharded, (str(folder), f"{meeting}/store"), nprocs=RANKS)


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
