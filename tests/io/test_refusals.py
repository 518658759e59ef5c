"""What cannot be saved or loaded: what is called, and words that its error must have."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from funcamp import distributed, load, save
from tests.support.helpers import assert_refused, assert_same, clone
from tests.support.models import cnn, mlp
from tests.support.steps import build


class Touch:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def write(value: Any, cut: int = 0) -> str:
    """A file with this value, without its last bytes."""
    file = Path("checkpoint.pt")
    torch.save({"a": value}, file)
    file.write_bytes(file.read_bytes()[: -cut or None])
    return str(file)


STEP, OTHER = build(mlp()), build(cnn(), ema_decay=0.9)
LIKE, OTHERS = STEP.init(), OTHER.init()
ANY: Any = 3


def loaded(change: Callable[[dict[str, Any]], Any], sharded: bool = False) -> Callable[[], object]:
    """Load what is saved of a state after a change."""

    def call() -> object:
        saved = distributed.sharded_state_dict(LIKE) if sharded else STEP.state_dict(LIKE)
        if sharded:
            return distributed.load_sharded_state_dict(change(dict(saved)), LIKE)
        return STEP.load_state_dict(change(dict(saved)), like=LIKE)

    return call


def scale_of(value: float) -> Callable[[dict[str, Any]], Any]:
    return lambda saved: saved | {"scaler.scale": torch.tensor(value)}


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda saved: saved | {name: change(saved[name])}


def without(saved: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in saved.items() if name != "step"}


WEIGHT, GROUP = "params.0.weight", "params.0"
LOAD, SHARDED = "^load_state_dict: saved ", "^load_sharded_state_dict: saved "
FORMAT = r"path must be a file of torch\.save's format; .* package safetensors"
SCALE = r"\['scaler.scale'\] must be above 0 and finite; got "
ROWS: dict[str, tuple[Callable[[], object], Any, str]] = {
    "a number as path": (lambda: save({}, ANY), TypeError, r"save: path must be a str or an os\.PathLike; got 3"),
    "no dict": (lambda: save(ANY, "a.pt"), TypeError, "saved must be a dict, as state_dict gives it; got 3"),
    "safetensors": (lambda: save({}, "a.safetensors"), ValueError, FORMAT),
    "safetensors to load": (lambda: load(Path("a.safetensors")), ValueError, FORMAT),
    "a number of numpy": (lambda: save({"best": numpy.mean([1.0])}, "a.pt"), TypeError, r"got numpy.*: convert it .*float\(x\)"),
    "a path in a file": (lambda: save({"out": Path("a")}, "a.pt"), TypeError, r"got pathlib\.PosixPath: .*str\(path\)"),
    "code in a file": (lambda: load(write(Touch())), pickle.UnpicklingError, "Weights only load failed"),
    "a file that is cut": (lambda: load(write(torch.ones(1000), cut=1000)), (RuntimeError, OSError), ""),
    "another model": (
        # contract: "loading a checkpoint with other names than the state's"
        loaded(lambda _: OTHER.state_dict(OTHERS)), ValueError, f"{LOAD}must hold the names"
    ),
    "all of a file": (
        loaded(lambda saved: {"state": saved, "epoch": 1}), ValueError, rf"{LOAD}.*: pass saved\['state'\], which has them"
    ),
    "a scale of 0": (loaded(scale_of(0.0)), ValueError, f"{LOAD[:-1]}{SCALE}0"),
    "a scale of NaN in slices": (loaded(scale_of(math.nan), True), ValueError, f"{SHARDED[:-1]}{SCALE}nan"),
    "a sparse tensor": (loaded(changed(WEIGHT, torch.Tensor.to_sparse)), ValueError, rf"\['{WEIGHT}'\] must be like"),
    "another shape in slices": (
        loaded(changed(GROUP, lambda value: value[None]), True), ValueError, rf"\['{GROUP}'\] must be like a"
    ),
    "slices without a name": (loaded(without, True), ValueError, f"{SHARDED}must hold the names .*; it lacks 'step'; 1 of"),
    "a list of slices": (loaded(list, True), TypeError, f"{SHARDED}must be a dict of tensors by name; got "),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_it_is_refused_with_the_rule(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = clone(LIKE)
    monkeypatch.chdir(tmp_path)
    save({"w": 1}, "a.pt")
    assert_refused(*ROWS[name])
    assert_same(LIKE, before)
    assert not Path("ran").exists()
    assert not list(tmp_path.glob("*.part"))
    assert load("a.pt") == {"w": 1}
