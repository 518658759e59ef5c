"""Run the cases on this rank, one after the other: `torchrun ... -m tests.distributed.ranks FOLDER [CASE ...]`."""

from __future__ import annotations

import datetime
import json
import os
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.ranks import CASES

#: A rank that fails closes its connections; this only ends a group that hangs, on however busy a machine.
TIMEOUT = datetime.timedelta(seconds=600)


def main(folder: str, *chosen: str) -> None:
    """Write, after each case, what this rank has found: an empty string, or how it failed."""
    warnings.simplefilter("error", UserWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    found: dict[str, str] = {}
    for name, (worlds, case) in CASES.items():
        if dist.get_world_size() not in worlds or name not in (chosen or CASES):
            continue
        torch.manual_seed(0)
        try:
            case()
            found[name] = ""
        except BaseException:
            found[name] = traceback.format_exc()
        Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found))
        torch._dynamo.reset()
        if found[name]:  # the others may wait in a collective: nothing after it would be told apart
            os._exit(1)
    dist.barrier()
    os._exit(0)  # a thread of the group that refers to a DTensor when the interpreter ends aborts the process


if __name__ == "__main__":
    main(*sys.argv[1:])
