"""Training programs under torchrun: they print, save and go on; where a process dies nothing hangs or is lost."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

import funcamp
from tests.support.helpers import assert_same
from tests.support.launch import BOUND, ENVIRONMENT, ROOT, lines, torchrun
from tests.support.programs import import_example

pytestmark = pytest.mark.processes

processes = import_example("_processes")
train_ddp = import_example("train_ddp")
train_fsdp2 = import_example("train_fsdp2")
train_gpt = import_example("train_gpt")

#: --timeout of runs in which a process dies and the others must not need it, in seconds.
PATIENCE = 600

DYING = "tests.distributed.dying"
TINY = ["--width=16", "--layers=1", "--heads=2", "--context=16", "--batch=4", "--save-every=4", "--log-every=2"]


def steps(printed: list[str]) -> list[int]:
    """The steps that the lines of a whole run report; every overflow has halved the scale, from 2^24."""
    found = [re.fullmatch(r"step (\d+)  loss (\d\.\d{3})  scale 2\^(\d+)  skipped (\d+)", line) for line in printed]
    rows = [[float(value) for value in match.groups()] for match in found if match]
    assert len(rows) == len(printed) - 1, printed
    for _, loss, power, skipped in rows:
        assert 5 < loss < 6
        assert 24 - skipped <= power <= 25 - skipped
    assert 0 < rows[-1][3] < rows[-1][0]
    return [int(row[0]) for row in rows]


@pytest.fixture
def alone() -> Iterator[None]:
    """This process as a group of one."""
    processes.join("cpu", BOUND)
    yield
    dist.destroy_process_group()


def state_in(folder: Path) -> Any:
    """The newest state there, read by one process."""
    args = train_ddp.parse([*TINY, f"--out={folder}", "--resume"])
    return train_ddp.load_checkpoint(train_ddp.make_step(args), args)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("death", "flag"),
    [(("forward", "kill", 1, 6), "--shard"), (("rename", "exit", 0, 2), "--no-compile")],
    ids=["killed-in-a-step", "gone-before-the-rename"],
)
def test_restarted_run_ends_in_the_uninterrupted_ones_bits(
    death: tuple[object, ...], flag: str, tmp_path: Path, alone: None
) -> None:
    options = [*TINY, flag, "--steps=12"]
    whole = lines(torchrun(2, "examples/train_ddp.py", *options, f"--out={tmp_path / 'whole'}"))
    assert whole[0] == "processes 2, from step 0"
    assert steps(whole) == [2, 4, 6, 8, 10, 12]
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["step-00000008", "step-00000012"]
    out = tmp_path / "parts"
    run = torchrun(2, "-m", DYING, *death, "train_ddp", *options, "--resume", f"--out={out}", restarts=1)
    printed = [line for line in lines(run) if line.startswith("processes")]
    assert printed == ["processes 2, from step 0", "processes 2, from step 4"]
    assert sorted(path.name for path in out.iterdir()) == ["step-00000008", "step-00000012"]
    # Two processes saved these, and one reads them, not sharded.
    state = state_in(out)
    assert state.step == 12
    assert_same(state, state_in(tmp_path / "whole"))


@pytest.mark.thorough
def test_torchrun_ends_soon_after_a_process_does(tmp_path: Path) -> None:
    options = [*TINY, "--steps=12", f"--timeout={PATIENCE}", f"--out={tmp_path}"]
    run = torchrun(2, "-m", DYING, "write", "exit", 1, 2, "train_ddp", *options)
    assert run.code != 0
    assert re.search(r"rank +: 1 .*\n +exitcode +: 3 ", run.launcher), run.everything
    assert [path.name for path in processes.whole(tmp_path)] == ["step-00000004"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("death", "flags", "message"),
    [
        (("forward", "kill"), [f"--timeout={PATIENCE}"], "by peer|[Bb]roken pipe"),
        (("forward", "stop"), ["--timeout=20", "--shard"], "[Tt]imed out"),
    ],
    ids=["killed", "stopped"],
)
def test_the_others_raise_without_a_launcher_that_ends_them(
    death: tuple[str, str], flags: list[str], message: str, tmp_path: Path
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    command = [
        sys.executable,
        "-m",
        DYING,
        *death,
        "1",
        "3",
        "train_ddp",
        *TINY,
        *flags,
        f"--out={tmp_path}",
    ]
    environment = {**ENVIRONMENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
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
    assert re.search(rf"RuntimeError: .*({message})", printed), printed
    assert started[1].returncode == -signal.SIGKILL


def parts_in(folder: Path) -> dict[str, Any]:
    """The newest state there of the program with FSDP2, read by one process."""
    parser = processes.make_parser("train_fsdp2", "")
    run = train_fsdp2.Run(parser.parse_args(TINY), 1)
    saved: dict[str, Any] = run.state_dict()
    load_parts(saved, checkpoint_id=processes.newest(folder))
    run.load_state_dict(saved)
    whole: dict[str, Any] = _pytree.tree_map_only(DTensor, DTensor.full_tensor, run.state_dict())
    return whole


@pytest.mark.thorough(keep=1)
def test_fsdp2_run_goes_on_bit_for_bit(tmp_path: Path, alone: None) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    printed = lines(torchrun(2, "examples/train_fsdp2.py", *TINY, "--steps=12", f"--out={whole}"))
    assert printed[0] == "processes 2, from step 0"
    assert steps(printed) == [2, 4, 6, 8, 10, 12]
    shutil.copytree(whole / "step-00000008", parts / "step-00000008")
    resumed = lines(torchrun(2, "examples/train_fsdp2.py", *TINY, "--steps=12", f"--out={parts}", "--resume"))
    assert resumed == ["processes 2, from step 8", *printed[-2:]]
    saved = parts_in(parts)
    assert saved["taken"] == 12
    assert_same(saved, parts_in(whole))


@pytest.mark.thorough
@pytest.mark.parametrize("program", [["train_fsdp2"], ["train_ddp", "--shard"]], ids=lambda program: program[0])
def test_run_with_dtensors_ends_before_the_threads_of_its_group_can_abort_it(
    program: list[str], tmp_path: Path
) -> None:
    argv = [*program, *TINY, "--steps=1", f"--out={tmp_path}"]
    script = f"""
import atexit, runpy, sys
sys.argv = {argv!r}
atexit.register(print, "the interpreter ends")
runpy.run_path("examples/{program[0]}.py", run_name="__main__")
"""
    path = os.pathsep.join([str(ROOT / "examples"), str(ROOT)])
    command, env = [sys.executable, "-c", script], {**ENVIRONMENT, "PYTHONPATH": path}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=BOUND, check=True)
    assert run.stdout.splitlines()[-1].startswith("step 1 "), run.stderr
    assert "the interpreter ends" not in run.stdout


@pytest.mark.thorough
def test_demo_splits_its_batches_and_rank_0_alone_reports(tmp_path: Path) -> None:
    options = [*TINY[:5], "--eval-every=6", "--total=12", "--steps=6"]
    alone, together = tmp_path / "alone", tmp_path / "together"
    for flag in ([], ["--resume"]):
        train_gpt.main([*options, f"--out={alone}", *flag])
        printed = lines(torchrun(2, "examples/train_gpt.py", *options, f"--out={together}", *flag))
        for start in ("held-out loss", "steps ", "time ", "files ", "sample"):
            assert len([line for line in printed if line.startswith(start)]) == 1, printed
    assert {path.name for path in together.iterdir()} == {"checkpoint.pt", "train_gpt.png"}
    expected, found = (funcamp.load(folder / "checkpoint.pt") for folder in (alone, together))
    assert found["history"]["scale"] == expected["history"]["scale"]
    assert found["history"]["loss"] == pytest.approx(expected["history"]["loss"], rel=1e-3)
    assert sum(found["history"]["found_inf"]) < 12
    assert found["state"].keys() == expected["state"].keys()


@pytest.mark.thorough
@pytest.mark.parametrize("world", [1, 2, 4])
def test_parts_of_a_batch_are_the_batch(world: int) -> None:
    batch = torch.arange(16).view(4, 4), torch.arange(4)
    parts = [processes.part_of(batch, rank, world) for rank in range(world)]
    assert_same(tuple(torch.cat(leaves) for leaves in zip(*parts)), batch)


@pytest.mark.thorough
def test_checkpoint_that_is_not_whole_is_passed_over_and_removed(tmp_path: Path, alone: None) -> None:
    for name in ("step-00000004", "step-00000008", "step-00000012.part"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes").touch()
    assert processes.checkpoint_to_resume(tmp_path) == tmp_path / "step-00000008"
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000004", "step-00000008", "notes"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps=0"], "--steps must be positive; got 0"),
        (["--timeout=-1"], "--timeout must be positive; got -1.0"),
        (["--init-scale=0"], "--init-scale must be positive; got 0.0"),
        (["--out=/dev/null/x"], "--out must be a folder that can be written; got /dev/null/x"),
        (["--width=15"], "--width must be a multiple of --heads; got 15 and 2"),
        (["--batch=5"], "--batch must be a multiple of the number of processes; got 5 and 2"),
        ([], "--out must be a folder without checkpoints, or --resume be given"),
    ],
    ids=str,
)
def test_bad_option_is_named(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "step-00000004").mkdir()
    for program in (train_ddp, train_fsdp2):
        with pytest.raises(SystemExit):
            program.main([*TINY, f"--out={tmp_path}", *arguments])
        assert message in capsys.readouterr().err
