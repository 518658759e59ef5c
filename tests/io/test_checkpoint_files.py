"""Checkpoints: a run goes on from one bit for bit, a kill at any moment leaves one whole, a bad file says so."""

from __future__ import annotations

import functools
import itertools
import math
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as checkpoint_module

import funcamp
from funcamp import ScalerConfig, average, distributed, load, make_train_step, save, stateless
from tests.support.helpers import assert_same, clone, together
from tests.support.models import Task, cnn, mlp, tied
from tests.support.rules import RULES

dcp: Any = checkpoint_module  # its functions are untyped re-exports
ADAMW = stateless(torch.optim.AdamW, lr=1e-2)
NAME = "checkpoint.pt"
ROOT = Path(__file__).parent.parent.parent


def make(task: Task) -> funcamp.TrainStep:
    """Float16, moments, buffers, an average, and a scale that overflows at first."""
    return funcamp.make_train_step(
        funcamp.module_loss(task.model, task.criterion),
        funcamp.stateless(torch.optim.AdamW, lr=1e-2),
        funcamp.ScalerConfig(init_scale=2.0**20, growth_interval=2),
        policy="float16",
        ema_decay=0.9,
    )


def train(step: funcamp.TrainStep, state: funcamp.TrainState, task: Task, numbers: range) -> funcamp.TrainState:
    for number in numbers:
        state, _ = step(state, task.batch(number))
    return state


def through_file(saved: dict[str, Any], _: dict[str, Any], folder: Path) -> dict[str, Any]:
    save(saved, folder / "checkpoint.pt")
    return load(folder / "checkpoint.pt")


def through_dcp(saved: dict[str, Any], like: dict[str, Any], folder: Path) -> dict[str, Any]:
    dcp.save(saved, checkpoint_id=folder / "dcp", no_dist=True)
    dcp.load(like, checkpoint_id=folder / "dcp", no_dist=True)
    return like


def through_async_dcp(saved: dict[str, Any], like: dict[str, Any], folder: Path) -> dict[str, Any]:
    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
    )
    try:
        dcp.async_save(saved, checkpoint_id=folder / "dcp").result()
        dcp.load(like, checkpoint_id=folder / "dcp")
    finally:
        dist.destroy_process_group()
    return like


TRIPS = {"file": through_file, "dcp": through_dcp, "async dcp": through_async_dcp}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("before", "after"), [(True, True), (False, False), (True, False)], ids=["flat", "dict", "to dict"]
)
@pytest.mark.parametrize("trip", TRIPS.values(), ids=TRIPS)
def test_run_goes_on_from_a_checkpoint_bit_for_bit(trip: Any, before: bool, after: bool, tmp_path: Path) -> None:
    task = cnn()
    first, second = make(task), make(task)
    half = train(first, first.init(flat=before), task, range(5))
    assert 0 < half.opt_state[0].applied < 5
    saved, like = first.state_dict(half), second.state_dict(second.init(flat=after))
    resumed = second.load_state_dict(trip(saved, like, tmp_path), like=second.init(flat=after))
    assert_same(second.state_dict(resumed), saved)
    whole = train(second, second.init(flat=after), task, range(10))
    assert_same(train(second, resumed, task, range(5, 10)), whole)


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    task = tied()
    step = make(task)
    half = train(step, step.init(), task, range(3))
    save(step.state_dict(half), tmp_path / NAME)
    resumed = step.load_state_dict(load(tmp_path / NAME), like=step.init())
    assert_same(train(step, resumed, task, range(3, 6)), train(step, half, task, range(3, 6)))


def test_numbers_strings_and_nesting_come_back(tmp_path: Path) -> None:
    model = torch.nn.BatchNorm1d(2)
    saved = {
        "model": model.state_dict(),
        "history": [1, 2.5, None, True, 1j, "text", b"bytes", (1, [2])],
        "about": {3: torch.float16, "shape": torch.Size([2]), "device": torch.device("cpu")},
    }
    save(saved, tmp_path / "checkpoint.pt")
    back = load(tmp_path / "checkpoint.pt")
    assert_same(back, saved)
    model.load_state_dict(back["model"])


# What is no checkpoint.


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


def test_no_code_of_a_file_runs_and_a_cut_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    save({"a": Touch(tmp_path / "ran")}, file)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        load(file)
    assert os.listdir(tmp_path) == [file.name]
    save({"w": torch.ones(1000)}, file)
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises((RuntimeError, OSError)):
        load(file)


@pytest.mark.parametrize("path", [3, None, sys.stdout], ids=str)
def test_path_must_be_one(path: Any) -> None:
    for call in (functools.partial(save, {}), load):
        with pytest.raises(TypeError, match=r"path must be a str or an os\.PathLike; got "):
            call(path)


def test_another_packages_format_is_refused_and_its_tensors_are_taken(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = tmp_path / "checkpoint.safetensors"
    step = make(mlp())
    state = step.init()
    for call in (functools.partial(save, {}), load):
        with pytest.raises(ValueError, match=r"path must be a file of torch\.save's format; .* package safetensors"):
            call(file)
    save_file(step.state_dict(state), file)  # as the error says
    assert_same(step.load_state_dict(load_file(file), like=state), state)


def test_checkpoint_of_another_model_is_refused_and_the_state_stays(tmp_path: Path) -> None:
    other, step = make(mlp()), make(cnn())
    save(other.state_dict(other.init()), tmp_path / "checkpoint.pt")
    state = step.init()
    before = clone(state)
    with pytest.raises(ValueError, match="load_state_dict: saved must hold the names that state_dict gives; it lacks"):
        step.load_state_dict(load(tmp_path / "checkpoint.pt"), like=state)
    assert_same(state, before)


# What cannot be saved.


@pytest.mark.parametrize("scale", [math.nan, -8.0, 0.0, math.inf])
def test_a_scale_with_which_no_step_goes_on_is_refused(scale: float) -> None:
    step = make(mlp())
    like = step.init()
    message = rf"saved\['scaler.scale'\] must be above 0 and finite; got {scale:g}"
    with pytest.raises(ValueError, match="^load_state_dict: " + message):
        step.load_state_dict(step.state_dict(like) | {"scaler.scale": torch.tensor(scale)}, like=like)
    slices = distributed.sharded_state_dict(like)
    slices["scaler.scale"].fill_(scale)
    with pytest.raises(ValueError, match="^load_sharded_state_dict: " + message):
        distributed.load_sharded_state_dict(slices, like)


def test_names_of_slices_that_differ_are_told() -> None:
    like = make(mlp()).init()
    slices = distributed.sharded_state_dict(like)
    without = {name: value for name, value in slices.items() if name != "step"}
    cases = {
        "it lacks 'step'$": without,
        r"it lacks 'step', 'skipped', 'consecutive_skips', .*, \.\.\. \(\d+\)$": {},
        "it has unknown 'more'$": {**slices, "more": torch.zeros(())},
        "its names are in another order": {**without, "step": slices["step"]},
        "got a list": list(slices),
    }
    for message, saved in cases.items():
        with pytest.raises(ValueError, match=rf"load_sharded_state_dict: saved must be what .* gave; {message}"):
            distributed.load_sharded_state_dict(saved, like)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", sorted(RULES))
def test_states_of_every_rule_are_taken_back(rule: str) -> None:
    """After overflows and growth: some counters of other libraries are negative then."""
    config = ScalerConfig(8.0, growth_interval=2, rule=RULES[rule])
    step = make_train_step(lambda p, x: (p["w"] * x).sum(), stateless(torch.optim.SGD, lr=0.1), config)
    state = step.init({"w": torch.ones(2)})
    for value in (1.0, 1.0, 1.0, math.inf, math.inf, math.inf, 1.0):
        state, _ = step(state, torch.full((2,), value))
        assert_same(step.load_state_dict(step.state_dict(state), like=state), state)


@pytest.mark.parametrize("change", [Tensor.to_sparse, Tensor.double, lambda value: value[None]])
def test_tensors_of_another_kind_are_refused(change: Callable[[Tensor], Tensor]) -> None:
    step = make(mlp())
    like = step.init()
    saved, slices = step.state_dict(like), distributed.sharded_state_dict(like)
    name = next(name for name in saved if name.startswith("params.") and saved[name].dim() == 2)
    with pytest.raises(ValueError, match=rf"load_state_dict: saved\['{name}'\] must be like a .*; got a torch"):
        step.load_state_dict({**saved, name: change(saved[name])}, like=like)
    other = change(slices["params.0"])
    with pytest.raises(
        ValueError, match=r"load_sharded_state_dict: saved\['params.0'\] must be like a .*; got a torch"
    ):
        distributed.load_sharded_state_dict({**slices, "params.0": other}, like)


def test_an_average_ends_or_begins_at_a_checkpoint() -> None:
    """Without its names the rest is loaded; it begins as the loaded parameters."""
    task = mlp()
    loss_fn = funcamp.module_loss(task.model, task.criterion)
    averaging, plain = make_train_step(loss_fn, ADAMW, ema_decay=0.9), make_train_step(loss_fn, ADAMW)
    state = train(averaging, averaging.init(), task, range(3))
    saved = averaging.state_dict(state)
    with pytest.raises(ValueError, match=r"load_state_dict: .*; it has unknown 'ema"):
        plain.load_state_dict(saved, like=plain.init())
    without = {name: value for name, value in saved.items() if not name.startswith("ema.")}
    loaded = plain.load_state_dict(without, like=plain.init())
    assert_same(loaded, state._replace(opt_state=state.opt_state[0]))

    begun = loaded._replace(opt_state=(loaded.opt_state, average(0.9).init(loaded.params)))
    assert_same(begun.ema, loaded.params)
    assert averaging.state_dict(begun).keys() == saved.keys()
    averaging(begun, task.batch(3))


# How a file is replaced.


def test_file_is_on_disk_before_it_gets_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int, int]] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        calls.append(("sync", os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))
        fsync(descriptor)

    def replaced(source: str, target: str) -> None:
        calls.append(("replace", os.stat(source).st_ino, os.stat(source).st_size))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    save({"w": torch.ones(1000)}, tmp_path / NAME)
    file = (tmp_path / NAME).stat()
    assert calls == [("sync", file.st_ino, file.st_size), ("replace", file.st_ino, file.st_size)]


def test_interrupted_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"w": torch.ones(2)}, tmp_path / NAME)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    for where in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, where, interrupt)
            with pytest.raises(KeyboardInterrupt):
                save({"w": torch.zeros(2)}, tmp_path / NAME)
        assert os.listdir(tmp_path) == [NAME]
        assert_same(load(tmp_path / NAME), {"w": torch.ones(2)})


def test_saves_of_one_file_at_once_each_succeed_and_one_wins(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"

    def saves(rank: int) -> None:
        for _ in range(20):
            save({"a": torch.full((1000,), rank), "b": torch.full((1000,), rank)}, file)
            assert_same(*({"w": value} for value in load(file).values()))

    together(saves, threads=4)
    assert os.listdir(tmp_path) == [file.name]


def saves_that_die(name: str) -> None:
    """Save in processes that are killed before every call of the system in turn, and at bytes over the whole file."""
    torch.set_num_threads(1)  # forked processes have one thread
    file, number, found = Path(name), 0, set()

    def state() -> dict[str, Tensor]:
        return {f"tensor{index}": torch.full((2**12,), float(number)) for index in range(4)}

    def killed(arm: Callable[[], object]) -> bool:
        nonlocal number
        number += 1
        child = os.fork()
        if not child:
            try:
                arm()
                save(state(), file)
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        loaded, wanted = load(file), state()
        replaced = loaded["tensor0"][0] == number
        if not replaced:
            number -= 1
            wanted = state()
        assert_same(loaded, wanted)
        assert os.WIFSIGNALED(status) or (os.WEXITSTATUS(status) == 0 and replaced)
        left = [entry for entry in os.listdir(file.parent) if entry != file.name]
        assert all(re.fullmatch(rf"{re.escape(file.name)}\.[0-9a-f]{{8}}\.part", entry) for entry in left)
        for entry in left:
            os.remove(file.parent / entry)
        found.add((bool(replaced), bool(left)))
        return os.WIFSIGNALED(status)

    def at_call(last: int) -> None:
        calls = itertools.count(1)

        def before(_: Any, event: str, function: Any) -> None:
            if event == "c_call" and function.__module__ in SYSTEM and next(calls) == last:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(before)

    def at_byte(last: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (last, last))

    assert not killed(lambda: None)
    assert next(call for call in itertools.count(1) if not killed(functools.partial(at_call, call))) > 5
    assert found == {(False, False), (False, True), (True, False)}
    size = file.stat().st_size
    assert all(killed(functools.partial(at_byte, byte)) for byte in range(0, size, size // 8))


#: The modules through which Python calls the system.
SYSTEM = ("posix", "io", "_io")


@pytest.mark.processes
def test_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    program = f"from tests.io.test_checkpoint_files import saves_that_die as run; run({str(tmp_path / NAME)!r})"
    # A process of its own, whose forks are safe: it has one thread.
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
