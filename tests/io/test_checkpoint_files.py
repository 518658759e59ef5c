"""Checkpoints: a run goes on from one bit for bit, and at every moment the file is the old one or the new one."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as checkpoint_module

from funcamp import ScalerConfig, load, make_train_step, save, stateless
from tests.support.helpers import assert_same, together
from tests.support.models import Task, cnn, mlp
from tests.support.rules import RULES
from tests.support.steps import build, train

dcp: Any = checkpoint_module  # its functions are untyped re-exports
ADAMW = stateless(torch.optim.AdamW, lr=1e-2)
NAME = "checkpoint.pt"


def make(task: Task, ema_decay: float | None = 0.9) -> Any:
    """Float16, moments, buffers, an average, and a scale that overflows at first."""
    config = ScalerConfig(init_scale=2.0**20, growth_interval=2)
    return build(task, ADAMW, config=config, policy="float16", ema_decay=ema_decay)


def through_file(saved: dict[str, Any], _: dict[str, Any], folder: Path) -> dict[str, Any]:
    save(saved, folder / NAME)
    return load(folder / NAME)


def through_dcp(saved: dict[str, Any], like: dict[str, Any], folder: Path) -> dict[str, Any]:
    dcp.save(saved, checkpoint_id=folder / "dcp", no_dist=True)
    dcp.load(like, checkpoint_id=folder / "dcp", no_dist=True)
    return like


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False)], ids=["flat", "to dict"])
@pytest.mark.parametrize("trip", [through_file, through_dcp])
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


@pytest.mark.parametrize("rule", sorted(RULES))
def test_states_of_every_rule_are_taken_back(rule: str) -> None:
    """After overflows and growth: some counters of other libraries are negative then."""
    config = ScalerConfig(8.0, growth_interval=2, rule=RULES[rule])
    step = make_train_step(lambda p, x: (p["w"] * x).sum(), stateless(torch.optim.SGD, lr=0.1), config)
    state = step.init({"w": torch.ones(2)})
    for value in (1.0, 1.0, 1.0, math.inf, math.inf, math.inf, 1.0):
        state, _ = step(state, torch.full((2,), value))
        assert_same(step.load_state_dict(step.state_dict(state), like=state), state)


def test_an_average_ends_at_a_checkpoint_without_its_names() -> None:
    task = mlp()
    averaging, plain = make(task), make(task, ema_decay=None)
    state = train(averaging, averaging.init(), task, range(3))
    without = {name: value for name, value in averaging.state_dict(state).items() if not name.startswith("ema.")}
    loaded = plain.load_state_dict(without, like=plain.init())
    assert_same(loaded, state._replace(opt_state=state.opt_state[0]))


# How a file is replaced.


def test_file_is_on_disk_before_it_gets_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int, int]] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        calls.append(("sync", os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))
        fsync(descriptor)

    def replaced(source: str, target: str) -> None:
        assert re.fullmatch(rf"{NAME}\.[0-9a-f]{{8}}\.part", Path(source).name)  # what a killed process leaves
        calls.append(("replace", os.stat(source).st_ino, os.stat(source).st_size))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    save({"w": torch.ones(1000)}, tmp_path / NAME)
    file = (tmp_path / NAME).stat()
    assert calls == [(name, file.st_ino, file.st_size) for name in ("sync", "replace")]


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_interrupted_save_leaves_nothing(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    save({"w": torch.ones(2)}, tmp_path / NAME)
    monkeypatch.setattr(os, where, interrupt)
    with pytest.raises(KeyboardInterrupt):
        save({"w": torch.zeros(2)}, tmp_path / NAME)
    assert os.listdir(tmp_path) == [NAME]
    assert_same(load(tmp_path / NAME), {"w": torch.ones(2)})


def test_saves_of_one_file_at_once_each_succeed_and_one_wins(tmp_path: Path) -> None:
    file = tmp_path / NAME

    def saves(rank: int) -> None:
        for _ in range(20):
            save({"a": torch.full((1000,), rank), "b": torch.full((1000,), rank)}, file)
            assert_same(*({"w": value} for value in load(file).values()))

    together(saves, threads=4)
    assert os.listdir(tmp_path) == [NAME]
