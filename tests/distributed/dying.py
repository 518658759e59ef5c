"""An example in which one process dies: `-m tests.distributed.dying WHERE HOW RANK CALL EXAMPLE [OPTION ...]`.

The process of this rank ends, or stops for good, at the given call of what WHERE names; after a restart nothing dies.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from tests.support.programs import import_example

#: The others then wait for this rank's gradients, or for its part of a checkpoint, or for nothing yet.
PLACES: dict[str, tuple[type, str]] = {
    "forward": (import_example("_gpt").GPT, "forward"),
    "write": (FileSystemWriter, "write_data"),
    "rename": (Path, "rename"),
}
WAYS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(3),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def arm(where: str, how: str, call: int) -> None:
    """Die at this call, counted from 1."""
    place, name = PLACES[where]
    method, calls = getattr(place, name), [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += where != "rename" or args[0].suffix == ".part"  # torch renames files of its own
        if calls[0] == call:
            WAYS[how]()
        return method(*args, **kwargs)

    setattr(place, name, counted)


def start_together(attempt: str) -> None:
    """Wait for the other processes: on a busy machine one may start later than the group's timeout allows."""
    c10d: Any = dist  # stores are untyped re-exports
    store = c10d.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    started = c10d.PrefixStore(f"started, attempt {attempt}", store)
    started.set(os.environ["RANK"], "")
    started.wait([str(rank) for rank in range(int(os.environ["WORLD_SIZE"]))])


if __name__ == "__main__":
    where, how, rank, call, example, *options = sys.argv[1:]
    program, attempt = import_example(example), os.environ["TORCHELASTIC_RESTART_COUNT"]
    if rank == os.environ["RANK"] and attempt == "0":
        arm(where, how, int(call))
    start_together(attempt)
    program.main(options)
