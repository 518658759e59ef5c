"""Run the tests of this folder on this rank: `torchrun ... -m tests.distributed.ranks [an option of pytest ...]`.

Every rank runs the same ones in the same order.
"""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

#: A rank that fails closes its connections; this only ends a group that hangs, on however busy a machine.
TIMEOUT = datetime.timedelta(seconds=600)


def main(*options: str) -> None:
    """Stop at the first test that fails: in its collectives the other ranks would wait for this one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    folder = Path(__file__).parent
    files = [str(folder / f"{name}.py") for name in ("functions", "step", "loops", "checkpoint")]
    warnings = "filterwarnings=error::UserWarning"
    others = 6 - dist.get_world_size()  # 4 of 2, 2 of 4
    status = pytest.main(["-x", "-o", warnings, "-m", f"not ranks(n={others})", *options, *files])
    if not status:
        dist.barrier()
    sys.stdout.flush()
    os._exit(status)  # a thread of the group that refers to a DTensor when the interpreter ends aborts the process


if __name__ == "__main__":
    main(*sys.argv[1:])
