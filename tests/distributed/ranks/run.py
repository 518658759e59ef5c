"""Run the cases on this rank, one after the other: `torchrun ... -m tests.distributed.ranks.run FOLDER [CASE ...]`."""

from __future__ import annotations

import datetime
import json
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.ranks import CASES

#: A rank that fails closes its connections; this only ends a group that hangs, on however busy a machine.
TIMEOUT = datetime.timedelta(seconds=600)


def main(folder: str, chosen: list[str]) -> None:
    """Write, after each case, what this rank has found: an empty string, or how it failed."""
    warnings.simplefilter("error", UserWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, world = dist.get_rank(), dist.get_world_size()
    found: dict[str, str] = {}
    for name, (worlds, case) in CASES.items():
        if world not in worlds or (chosen and name not in chosen):
            continue
        torch.manual_seed(0)
        begun = time.perf_counter()
        try:
            case()
            found[name] = ""
        except BaseException:
            found[name] = traceback.format_exc()
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
        if rank == 0:
            sys.stdout.write(f"{time.perf_counter() - begun:6.1f} s  {name}\n")
        torch._dynamo.reset()
        if found[name]:  # the others may wait in a collective: nothing after it would be told apart
            sys.exit(1)
    dist.barrier()  # a thread of the group that holds a DTensor when the interpreter ends aborts the process
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
