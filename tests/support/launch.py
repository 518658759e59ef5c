"""torchrun, for tests of programs on several processes. Each process prints to files of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent.parent
#: Seconds for a launch, at most, where other tests run beside it.
BOUND = 300
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::UserWarning"}


class Ended(NamedTuple):
    """A launch that is over."""

    code: int
    stdout: list[str]
    """What each rank printed, one attempt after the other."""
    everything: str
    """For the message of a test that fails."""


def torchrun(world: int, *arguments: object, restarts: int = 0, bound: int = BOUND) -> Ended:
    """Run a program, or `-m` a module, on this many processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"]
    command += [f"--nproc-per-node={world}", f"--max-restarts={restarts}"]
    with tempfile.TemporaryDirectory() as folder:
        # One pipe for all processes would mix their lines.
        command += ["--redirects=3", f"--log-dir={folder}", *map(str, arguments)]
        with subprocess.Popen(
            command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as launcher:
            try:
                own, _ = launcher.communicate(timeout=bound)
            except subprocess.TimeoutExpired:
                launcher.terminate()  # it ends its processes, which a kill would leave running
                own, _ = launcher.communicate()
                pytest.fail(f"{arguments} ran for more than {bound} seconds\n{_everything(folder, own)}")
        stdout = [
            "".join(file.read_text() for file in sorted(Path(folder).glob(f"*/attempt_*/{rank}/stdout.log")))
            for rank in range(world)
        ]
        return Ended(launcher.returncode, stdout, _everything(folder, own))


def _everything(folder: str, own: str) -> str:
    """The end of what torchrun printed and of every process's files."""
    files = sorted(Path(folder).glob("*/attempt_*/*/*.log"))
    texts = {"torchrun": own} | {"/".join(file.parts[-3:]): file.read_text() for file in files}
    return "\n".join(f"{name}:\n{text[-4000:]}" for name, text in texts.items() if text)


def lines(run: Ended) -> list[str]:
    """What rank 0 of a run that went well printed; the other ranks print nothing."""
    assert run.code == 0, run.everything
    assert not any(run.stdout[1:]), run.everything
    return run.stdout[0].splitlines()
