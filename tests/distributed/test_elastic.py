"""Training programs under torchrun: they print, save and go on; where a process dies nothing hangs or is lost."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import funcamp
from tests.support.helpers import assert_same
from tests.support.launch import BOUND, ENVIRONMENT, ROOT, lines, torchrun
from tests.support.programs import import_example

pytestmark = pytest.mark.processes

DYING = "tests.distributed.dying"
TINY = ["--width=16", "--layers=1", "--heads=2", "--context=16", "--batch=4", "--save-every=4", "--log-every=2"]


def saved_in(folder: Path) -> dict[str, Any]:
    """The checkpoints there, read by one process."""
    found = {}
    for path in folder.iterdir():
        dcp_to_torch_save(path, path.with_suffix(".pt"))
        found[path.name] = torch.load(path.with_suffix(".pt"), weights_only=False)
    return found


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("program", [["train_ddp", "--shard"], ["train_fsdp2"]], ids=lambda program: program[0])
def test_a_restarted_run_ends_in_the_uninterrupted_ones_bits(program: list[str], tmp_path: Path) -> None:
    name, *flags = program
    options, whole, parts = [*TINY, *flags, "--steps=12"], tmp_path / "whole", tmp_path / "parts"
    first, *printed = lines(torchrun(2, f"examples/{name}.py", *options, f"--out={whole}"))
    assert first == "processes 2, from step 0"
    assert [int(line.split()[1]) for line in printed] == [2, 4, 6, 8, 10, 12]
    assert not printed[-1].endswith("skipped 0")
    run = torchrun(2, "-m", DYING, "SIGKILL", 6, name, *options, "--resume", f"--out={parts}", restarts=1)
    starts = [line for line in lines(run) if line.startswith("processes")]
    assert starts == ["processes 2, from step 0", "processes 2, from step 4"]
    expected = saved_in(whole)
    assert expected.keys() == {"step-00000008", "step-00000012"}
    assert_same(saved_in(parts), expected)


@pytest.mark.thorough
def test_if_a_process_stops_the_others_raise(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    environment = {**ENVIRONMENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    command = [sys.executable, "-m", DYING, "SIGSTOP", "3", "train_ddp", *TINY, "--timeout=12", f"--out={tmp_path}"]
    started = [
        subprocess.Popen(command, cwd=ROOT, env={**environment, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        _, printed = started[0].communicate(timeout=BOUND)
    finally:
        for process in started:
            process.kill()
        started[1].communicate()
    # It raised and printed. At the interpreter's end a thread of the group it never left may still abort it: see
    # `end` in examples/_processes.py.
    assert started[0].returncode in (1, -signal.SIGABRT), printed
    assert re.search("RuntimeError: .*[Tt]imed out", printed), printed


@pytest.mark.thorough
def test_the_demo_splits_its_batches_and_rank_0_alone_reports(tmp_path: Path) -> None:
    options, alone, together = [*TINY[:5], "--eval-every=6", "--total=6", "--steps=6"], tmp_path / "1", tmp_path / "2"
    import_example("train_gpt").main([*options, f"--out={alone}"])
    printed = lines(torchrun(2, "examples/train_gpt.py", *options, f"--out={together}"))
    assert len([line for line in printed if line.startswith("held-out loss")]) == 1, printed
    expected, found = (funcamp.load(folder / "checkpoint.pt")["history"] for folder in (alone, together))
    assert found["scale"] == expected["scale"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3)


def test_a_checkpoint_that_is_not_whole_is_passed_over_and_removed(tmp_path: Path) -> None:
    processes: Any = import_example("_processes")
    for name in ("step-00000004", "step-00000008", "step-00000012.part"):
        (tmp_path / name).mkdir()
    processes.join("cpu", BOUND)
    assert processes.checkpoint_to_resume(tmp_path) == tmp_path / "step-00000008"
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000004", "step-00000008"}
    dist.destroy_process_group()
