"""An example in which one process dies: `torchrun ... -m tests.dying WHERE HOW RANK CALL EXAMPLE [OPTION ...]`.

The process of this rank ends, or stops for good, at the given call of what WHERE names; after a restart nothing dies.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

#: The others then wait for this rank's gradients, or for its part of a checkpoint, or for nothing yet.
PLACES: dict[str, tuple[type, str]] = {
    "forward": (importlib.import_module("_gpt").GPT, "forward"),
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


if __name__ == "__main__":
    where, how, rank, call, example, *options = sys.argv[1:]
    if rank == os.environ["RANK"] and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        arm(where, how, int(call))
    importlib.import_module(example).main(options)
