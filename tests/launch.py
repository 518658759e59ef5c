"""torchrun, for tests of programs on several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
#: Seconds for a launch, at most, where other tests run beside it.
BOUND = 300
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "error::UserWarning",
    # Or torch 2.11 to 2.13 keeps one store over restarts, where the new processes may find the dead ones' addresses.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class Ended(NamedTuple):
    """A launch that is over."""

    code: int
    printed: str
    """stdout and stderr."""


def torchrun(world: int, *arguments: object, restarts: int = 0, bound: int = BOUND) -> Ended:
    """Run a program, or `-m` a module, on this many processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"]
    command += [f"--nproc-per-node={world}", f"--max-restarts={restarts}", *map(str, arguments)]
    with subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        try:
            printed, _ = launcher.communicate(timeout=bound)
        except subprocess.TimeoutExpired:
            launcher.terminate()  # it ends its processes, which a kill would leave running
            printed, _ = launcher.communicate()
            pytest.fail(f"{arguments} ran for more than {bound} seconds\n{printed[-4000:]}")
    return Ended(launcher.returncode, printed)


def lines(run: Ended) -> list[str]:
    """What a run that went well printed."""
    assert run.code == 0, run.printed[-4000:]
    return run.printed.splitlines()
