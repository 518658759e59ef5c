"""Checkpoints: a run goes on from one bit for bit, a kill at any moment leaves one whole, a bad file says so."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as checkpoint_module

import funcamp
from funcamp import ScalerConfig, average, chain, distributed, every, load, make_train_step, save, stateless
from tests.support.helpers import assert_same, clone, together
from tests.support.models import Task, cnn, mlp, tied
from tests.support.rules import RULES

dcp: Any = checkpoint_module  # its functions are untyped re-exports
ADAMW = stateless(torch.optim.AdamW, lr=1e-2)
FORMATS = ["checkpoint.pt", "checkpoint.safetensors"]
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


def through_file(name: str) -> Callable[[dict[str, Any], dict[str, Any], Path], dict[str, Any]]:
    def trip(saved: dict[str, Any], like: dict[str, Any], folder: Path) -> dict[str, Any]:
        save(saved, folder / name)
        return load(folder / name)

    return trip


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


TRIPS = {name: through_file(name) for name in FORMATS} | {"dcp": through_dcp, "async dcp": through_async_dcp}


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


@pytest.mark.parametrize("name", FORMATS)
def test_tied_weights_stay_tied(name: str, tmp_path: Path) -> None:
    task = tied()
    step = make(task)
    half = train(step, step.init(), task, range(3))
    save(step.state_dict(half), tmp_path / name)
    resumed = step.load_state_dict(load(tmp_path / name), like=step.init())
    assert_same(train(step, resumed, task, range(3, 6)), train(step, half, task, range(3, 6)))


def test_torch_and_safetensors_read_what_save_wrote(tmp_path: Path) -> None:
    import safetensors.torch

    step = make(mlp())
    saved = step.state_dict(step.init())
    for name in FORMATS:
        save(saved, tmp_path / name)
    assert_same(torch.load(tmp_path / FORMATS[0], weights_only=True), saved)
    read = safetensors.torch.load_file(tmp_path / FORMATS[1])
    assert_same({key: read[key] for key in saved}, saved)


@pytest.mark.parametrize("name", FORMATS)
def test_any_layout_comes_back(name: str, tmp_path: Path) -> None:
    base = torch.randn(4, 6, dtype=torch.complex64)
    saved = {
        "base": base,
        "same": base,
        "transposed": base.T,
        "row": base[1],
        "strided": base[:, ::2],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "scalar": torch.tensor(3, dtype=torch.int64),
        "scalar of many": base[2, 3],
        "empty": torch.empty(0, 3),
        "empty too": torch.empty(0),
        "bfloat16": torch.randn(3).bfloat16(),
        "float8": torch.randn(3).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "result": torch.ones(2, requires_grad=True) * 2,
    }
    save(saved, tmp_path / name)
    back = load(tmp_path / name)
    assert back.keys() == saved.keys()
    for key, value in saved.items():
        assert (back[key].dtype, back[key].shape) == (value.dtype, value.shape), key
        assert torch.equal(
            back[key].float() if key == "float8" else back[key], value.float() if key == "float8" else value
        )


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # of torch 2.15, at each load
def test_sparse_tensors_come_back(tmp_path: Path) -> None:
    """A check that loads them onto "meta" would refuse them with torch 2.15."""
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    saved = {
        "coo": dense.to_sparse(),
        "repeated": torch.sparse_coo_tensor(
            torch.tensor([[0, 0, 1], [1, 1, 0]]), torch.tensor([1.5, 0.5, 3.0]), (2, 2)
        ),
        "without elements": torch.zeros(2, 2).to_sparse(),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((1, 1)),
        "bsc": dense.to_sparse_bsc((1, 1)),
    }
    save(saved, tmp_path / "saved.pt")
    back = load(tmp_path / "saved.pt")
    for key, value in saved.items():
        assert (back[key].layout, back[key].dtype) == (value.layout, value.dtype), key
        assert torch.equal(back[key].to_dense(), value.to_dense()), key


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


@pytest.mark.parametrize("name", FORMATS)
def test_loaded_tensors_are_on_the_device_asked_for_and_free_of_the_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    save({"w": torch.ones(1000)}, file)
    assert load(file, map_location="meta")["w"].device.type == "meta"
    loaded = load(file, map_location=torch.device("cpu"))
    with open(file, "r+b") as stream:  # in place, as another program may
        stream.write(b"\0" * file.stat().st_size)
    assert_same(loaded, {"w": torch.ones(1000)})


# What is no checkpoint.


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


def zipped(file: Path, **entries: bytes) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for entry, content in entries.items():
            archive.writestr(entry.replace("__", "/"), content)


def halved(file: Path) -> None:
    save({"w": torch.ones(1000)}, file)
    os.truncate(file, file.stat().st_size // 2)


def cross(file: Path) -> None:
    """The other format under this name."""
    other = file.with_suffix(".pt" if file.suffix == ".safetensors" else ".safetensors")
    save({"w": torch.ones(1000)}, other)
    other.rename(file)


def header(file: Path, **tensors: Any) -> None:
    head = json.dumps(tensors).encode()
    file.write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "text": (lambda file: file.write_text("step 1 loss 2.0\n" * 99), r"no zip file as torch.save makes \(1584 bytes\)"),
    "empty": (lambda file: file.write_bytes(b""), r"\(0 bytes\)"),
    "half": (halved, "is cut short"),
    "folder": (lambda file: file.mkdir(), "which is a folder .*torch.distributed.checkpoint.load reads folders"),
    "pickle": (lambda file: file.write_bytes(pickle.dumps(Touch(file.with_name("ran")))), "no zip file"),
    "object": (
        lambda file: torch.save({"a": Touch(file.with_name("ran"))}, file),
        "holds a posix.mkdir, which only code",
    ),
    "module": (lambda file: torch.save(torch.nn.Linear(1, 1), file), "holds a torch.nn.modules.linear.Linear, which"),
    "tensor": (lambda file: torch.save(torch.ones(1), file), "holds a Tensor instead of a dict"),
    "zip": (lambda file: zipped(file, hello=b"hi"), "cannot be read: RuntimeError: "),
    "wheel": (lambda file: zipped(file, a__hello=b"hi", a__b__c=b"hi"), "cannot be read: RuntimeError: "),
    "script": (lambda file: zipped(file, a__version=b"3\n", a__constants__pkl=b""), "cannot be read: "),
    "no pickle": (
        lambda file: zipped(file, a__version=b"3\n", **{"a__data.pkl": b"text"}),
        "is damaged|cannot be read: ",
    ),
    "safetensors": (cross, "no zip file"),
}
BAD_SAFE: dict[str, tuple[Callable[[Path], object], str]] = {
    "text": (BAD["text"][0], "SafetensorError: .*header too large"),
    "empty": (BAD["empty"][0], "SafetensorError: .*header too small"),
    "half": (halved, "SafetensorError: .*not fully covered"),
    "folder": (BAD["folder"][0], "which is a folder"),
    "pickle": (BAD["pickle"][0], "SafetensorError: "),
    "zip": (cross, "SafetensorError: .*header too large"),
    "unknown dtype": (lambda file: header(file, a={"dtype": "Q9", "shape": [1], "data_offsets": [0, 8]}), "Q9"),
    "short": (
        lambda file: header(file, a={"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}),
        "SafetensorError: ",
    ),
}


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [(FORMATS[0], *case) for case in BAD.values()] + [(FORMATS[1], *case) for case in BAD_SAFE.values()],
    ids=[*BAD, *(f"safe {case}" for case in BAD_SAFE)],
)
def test_bad_file_is_named_with_its_fault_and_never_run(
    name: str, write: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    write(file)
    with pytest.raises(ValueError, match=message) as caught:
        load(file)
    text = str(caught.value)
    assert text.startswith(f"load: path must name a complete checkpoint; got {str(file)!r}, which ")
    assert "\n" not in text
    assert "\x1b" not in text
    assert "weights_only" not in text or "TorchScript" in text
    assert len(text) < 300 + len(str(file))
    assert os.listdir(tmp_path) == [name]  # nothing ran


@pytest.mark.parametrize("name", FORMATS)
def test_missing_file_is_a_missing_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"load: path must name an existing file: '.*{name}'"):
        load(tmp_path / name)


@pytest.mark.parametrize("name", FORMATS)
def test_file_cut_anywhere_is_refused(name: str, tmp_path: Path) -> None:
    step = make(mlp())
    save(step.state_dict(step.init()), tmp_path / "whole")
    save(step.state_dict(step.init()), tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    spread = {len(whole) * part // 40 for part in range(40)}
    for length in sorted(spread | {1, 4, 8, 30, len(whole) - 1, len(whole) - 22, len(whole) - 23}):
        (tmp_path / name).write_bytes(whole[:length])
        with pytest.raises(ValueError, match="must name a complete checkpoint"):
            load(tmp_path / name)


@pytest.mark.parametrize("name", FORMATS)
def test_flipped_byte_of_data_goes_unnoticed_as_the_docstring_says(name: str, tmp_path: Path) -> None:
    # Not wanted but so: whoever sees this fail may take the sentence out of load's docstring.
    file, value = tmp_path / name, torch.full((1000,), 1.2345)
    save({"w": value}, file)
    content = bytearray(file.read_bytes())
    content[content.index(value.numpy().tobytes()) + 400] ^= 1
    file.write_bytes(content)
    assert (load(file)["w"] != value).sum() == 1


def test_checkpoint_of_another_model_is_refused_and_the_state_stays(tmp_path: Path) -> None:
    other, step = make(mlp()), make(cnn())
    save(other.state_dict(other.init()), tmp_path / "checkpoint.pt")
    state = step.init()
    before = clone(state)
    with pytest.raises(ValueError, match="load_state_dict: saved must hold the names that state_dict gives; it lacks"):
        step.load_state_dict(load(tmp_path / "checkpoint.pt"), like=state)
    assert_same(state, before)


# What cannot be saved.


def nested(depth: int) -> dict[str, Any]:
    saved: dict[str, Any] = {}
    for _ in range(depth):
        saved = {"a": saved}
    return saved


@pytest.mark.parametrize(
    ("name", "saved", "message"),
    [
        ("checkpoint.pt", [torch.ones(1)], "saved must be a dict, as state_dict gives it; got a list"),
        ("checkpoint.pt", mlp(), "saved must be a dict, as state_dict gives it; got a Task"),
        ("checkpoint.pt", {"a": [1, {"b": Task}]}, "the file holds a tests.support.models.Task, which only code could"),
        (
            "checkpoint.pt",
            {"a": funcamp.init()},
            "holds a funcamp._scaler.state.ScalerState, which only code could make",
        ),
        (
            "checkpoint.pt",
            {"a": torch.ones(2).numpy()[0]},
            "the file holds a numpy._core.multiarray.scalar, which only",
        ),
        ("checkpoint.pt", {funcamp.ScalerConfig(): 1}, "the file holds a funcamp._scaler.config.ScalerConfig, which"),
        ("checkpoint.pt", {"a": lambda: 1}, "pickle: Can't pickle"),
        ("checkpoint.pt", {"a": threading.Lock()}, "pickle: cannot pickle '_thread.lock' object"),
        ("checkpoint.pt", nested(3000), "pickle: maximum recursion depth exceeded"),
        ("checkpoint.safetensors", {"a": {"b": torch.ones(1)}}, "in safetensors; got a dict with 'b' for 'a'"),
        ("checkpoint.safetensors", {"a": 3}, "in safetensors; got 3 for 'a': save to a name that ends in .pt"),
        (
            "checkpoint.safetensors",
            {"a": torch.eye(2).to_sparse()},
            "saved must be a flat dict of dense tensors by name",
        ),
        (
            "checkpoint.safetensors",
            {"a": torch.ones(1, dtype=torch.complex128)},
            "it raises KeyError: torch.complex128",
        ),
        ("checkpoint.safetensors", {"a": torch.ones(1, device="meta")}, "Cannot copy out of meta tensor"),
        ("checkpoint.safetensors", {1: torch.ones(1)}, "of shape (1,) on cpu for 1"),
        ("checkpoint.safetensors", {"__metadata__": torch.ones(1)}, "the file cannot be read: SafetensorError: "),
    ],
    ids=lambda value: value[:48] if isinstance(value, str) else type(value).__name__,
)
def test_what_could_not_be_read_back_is_not_written(name: str, saved: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="^save: .*" + re.escape(message)):
        save(saved, tmp_path / name)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("path", [3, None, b"checkpoint.pt", sys.stdout], ids=str)
def test_path_must_be_one(path: Any) -> None:
    with pytest.raises(TypeError, match=r"^save: path must be a str or an os.PathLike; got "):
        save({}, path)
    with pytest.raises(TypeError, match=r"^load: path must be a str or an os.PathLike; got "):
        load(path)


def test_map_location_must_be_a_device_of_the_machine(tmp_path: Path) -> None:
    save({}, tmp_path / "checkpoint.pt")
    with pytest.raises(TypeError, match="load: map_location must be a device; got None"):
        load(tmp_path / "checkpoint.pt", map_location=None)  # type: ignore[arg-type]
    for missing in ["nonsense", *([] if torch.cuda.is_available() else ["cuda"])]:
        with pytest.raises(ValueError, match=f"load: map_location must be a device of this machine; got '{missing}'"):
            load(tmp_path / "checkpoint.pt", map_location=missing)


def test_missing_safetensors_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    file = tmp_path / "checkpoint.safetensors"
    for call in (lambda: save({"a": torch.ones(1)}, file), lambda: load(file)):
        with pytest.raises(ImportError, match="needs the package safetensors: pip install safetensors"):
            call()
    save({"a": torch.ones(1)}, tmp_path / "checkpoint.pt")
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


def test_what_is_held_twice_comes_back_twice(tmp_path: Path) -> None:
    inner = {"x": [1]}
    save({"a": inner, "b": [inner, inner]}, tmp_path / "twice.pt")
    assert load(tmp_path / "twice.pt") == {"a": inner, "b": [inner, inner]}


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("scaler.scale", float("nan"), r"saved\['scaler.scale'\] must be above 0 and finite; got nan"),
        ("scaler.scale", -8.0, r"saved\['scaler.scale'\] must be above 0 and finite; got -8"),
        ("scaler.scale", 0.0, r"saved\['scaler.scale'\] must be above 0 and finite; got 0"),
        ("scaler.scale", float("inf"), r"saved\['scaler.scale'\] must be above 0 and finite; got inf"),
        ("scaler.growth_tracker", -7, r"saved\['scaler.growth_tracker'\] must be 0 or more; got -7"),
        ("scaler.found_inf", float("nan"), r"saved\['scaler.found_inf'\] must be 0 or 1; got nan"),
        ("scaler.found_inf", 2.0, r"saved\['scaler.found_inf'\] must be 0 or 1; got 2"),
        ("skipped", 300, r"saved\['skipped'\] must be at most saved\['step'\]; got 300"),
        ("consecutive_skips", 3, r"saved\['consecutive_skips'\] must be at most saved\['skipped'\]; got 3"),
        ("step", -1, r"saved\['step'\] must be 0 or more; got -1"),
        ("skipped", -1, r"saved\['skipped'\] must be 0 or more; got -1"),
        ("opt_state.applied", -2, r"saved\['opt_state.applied'\] must be 0 or more; got -2"),
        ("opt_state.state.step.", -3.0, r"saved\['opt_state.*step.*'\] must be 0 or more; got -3"),
        ("opt_state.state.step.", float("nan"), r"saved\['opt_state.*step.*'\] must be 0 or more; got nan"),
    ],
)
@pytest.mark.parametrize("flat", [True, False])
def test_numbers_that_no_run_has_are_refused(entry: str, value: float, message: str, flat: bool) -> None:
    step = make(mlp())
    like = step.init(flat=flat)
    saved = step.state_dict(like)
    for name in saved:
        if name == entry or (entry.endswith(".") and name.startswith(entry)):
            saved[name] = torch.full_like(saved[name], value)
    with pytest.raises(ValueError, match="^load_state_dict: " + message):
        step.load_state_dict(saved, like=like)
    if flat:
        slices = distributed.sharded_state_dict(like)
        for name in slices:
            if name == entry or (entry.endswith(".") and name.startswith(entry)):
                slices[name] = torch.full_like(slices[name], value)
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


@pytest.mark.parametrize("strict", [True, False])
def test_tensors_that_no_state_can_hold_are_refused(strict: bool) -> None:
    step = make(mlp())
    like = step.init()
    saved = step.state_dict(like)
    name = next(name for name in saved if name.startswith("params.") and saved[name].dim() == 2)
    for value, got in (
        (saved[name].to_sparse(), "sparse_coo: to_dense"),
        (saved[name].to("meta"), "on meta, .*: load"),
    ):
        problem = rf"load_state_dict: saved\['{name}'\] must be like .*, dense, with values; got .*{got}"
        with pytest.raises(ValueError, match=problem):
            step.load_state_dict({**saved, name: value}, like=like, strict=strict)


@pytest.mark.parametrize("kept", [ADAMW, chain(average(0.5), ADAMW), chain(ADAMW, every(2, average(0.5)))], ids=repr)
@pytest.mark.parametrize("name", FORMATS)
def test_an_average_that_is_dropped_is_named(kept: Any, name: str, tmp_path: Path) -> None:
    """It is an error, or with strict=False a warning at the caller's line; without its names there is neither."""
    loss_fn = funcamp.module_loss(mlp().model, torch.nn.functional.mse_loss)
    averaging = make_train_step(loss_fn, kept, ema_decay=0.99 if kept is ADAMW else None)
    without = make_train_step(loss_fn, ADAMW)
    save(averaging.state_dict(averaging.init()), tmp_path / name)
    saved = load(tmp_path / name)
    like = without.init()
    own_names = without.state_dict(like).keys()
    average_names = [entry for entry in saved if entry not in own_names and not entry.endswith(".updates")]
    assert len(average_names) == len(like.params.tree())

    with pytest.raises(ValueError, match=rf"unknown '{min(average_names)}', of an average of .*ema_decay"):
        without.load_state_dict(saved, like=like)
    left_out = f"{len(average_names)} tensors, from '{average_names[0]}' to '{average_names[-1]}', are left out"
    with pytest.warns(UserWarning, match=left_out) as caught:
        state = without.load_state_dict(saved, like=like, strict=False)
    assert [warning.filename for warning in caught] == [__file__]
    assert state.ema == ()
    rest = {entry: value for entry, value in saved.items() if entry in own_names}
    assert_same(without.load_state_dict(rest, like=like), state)


def test_an_average_of_another_form_is_named_too() -> None:
    """Neither is an average that the new chain has under another name, nor one of another thing that is named so."""
    loss_fn = funcamp.module_loss(mlp().model, torch.nn.functional.mse_loss)
    one = make_train_step(loss_fn, ADAMW, ema_decay=0.9)
    two = make_train_step(loss_fn, chain(ADAMW, average(0.5), average(0.9)))
    saved = one.state_dict(one.init())
    with pytest.warns(UserWarning, match=r"from 'ema\.0\.weight' to 'ema\.\S+', are left out"):
        two.load_state_dict(saved, like=two.init(), strict=False)


class AveragesGradients:
    """A part of a chain whose state has a field of the same name as `average`'s."""

    def init(self, params: Any) -> Any:
        return {"average": {name: torch.zeros_like(value) for name, value in params.tree().items()}}

    def transform(self, update: Any, state: Any) -> Any:
        return update, state


def test_what_is_named_average_and_is_none_keeps_the_values_of_like() -> None:
    loss_fn = funcamp.module_loss(mlp().model, torch.nn.functional.mse_loss)
    plain, own = make_train_step(loss_fn, ADAMW), make_train_step(loss_fn, chain(AveragesGradients(), ADAMW))
    state = own.load_state_dict(plain.state_dict(plain.init()), like=own.init(), strict=False)
    kept = [value for name, value in own.state_dict(state).items() if ".average." in name]
    assert kept
    assert all(value.count_nonzero() == 0 for value in kept)


def test_a_parameter_that_is_frozen_takes_its_average_along() -> None:
    """No average is dropped: that of the other parameters stays."""
    task = mlp()
    step = make(task)
    saved = step.state_dict(step.init())
    task.model[0].requires_grad_(False)  # type: ignore[index]
    step = make(task)
    with pytest.raises(ValueError, match=r"it has unknown 'ema\.0\.bias'$"):
        step.load_state_dict(saved, like=step.init())
    state = step.load_state_dict(saved, like=step.init(), strict=False)
    assert state.ema.tree().keys() == state.params.tree().keys()


@pytest.mark.parametrize(
    "kept", [ADAMW, chain(average(0.5), ADAMW), chain(ADAMW, every(2, every(2, average(0.5))))], ids=repr
)
def test_an_average_that_begins_at_a_checkpoint_begins_as_its_parameters(kept: Any) -> None:
    loss_fn = funcamp.module_loss(mlp().model, torch.nn.functional.mse_loss)
    without = make_train_step(loss_fn, ADAMW)
    averaging = make_train_step(loss_fn, kept, ema_decay=0.99 if kept is ADAMW else None)
    saved = without.state_dict(without.init())
    for name in saved:
        if name.startswith("params."):
            saved[name] = saved[name] + 1
    loaded = averaging.load_state_dict(saved, like=averaging.init(), strict=False)
    trained = averaging.state_dict(loaded)
    for name, value in loaded.params.tree().items():
        of_it = [entry for entry in trained if entry.endswith(f".{name}") and ("average" in entry or "ema" in entry)]
        assert len(of_it) == 1
        assert_same(trained[of_it[0]], value)
        assert_same(value, saved[f"params.{name}"])


def test_sharded_tensors_that_no_state_can_hold_are_refused() -> None:
    like = make(mlp()).init()
    saved = distributed.sharded_state_dict(like)
    for value, got in ((saved["params.0"].to_sparse(), "sparse_coo"), (saved["params.0"].to("meta"), "on meta")):
        problem = rf"load_sharded_state_dict: saved\['params.0'\] must be like .*, dense, with values; got .*{got}"
        with pytest.raises(ValueError, match=problem):
            distributed.load_sharded_state_dict({**saved, "params.0": value}, like)


@pytest.mark.parametrize("name", ["pipe", "link", "pipe.safetensors"])
def test_pipe_is_not_read(tmp_path: Path, name: str) -> None:
    """Opening one would wait for a writer."""
    os.mkfifo(tmp_path / name.replace("link", "pipe"))
    if name == "link":
        os.symlink(tmp_path / "pipe", tmp_path / "link")
    with pytest.raises(ValueError, match=r"load: path must name a complete checkpoint; got .* a folder or a device"):
        load(tmp_path / name)


@pytest.mark.parametrize("path", ["new.pt/", "new.safetensors/", "old.pt/"])
def test_name_that_ends_as_a_folder_is_not_written(tmp_path: Path, path: str) -> None:
    save({"a": 1}, tmp_path / "old.pt")
    with pytest.raises(ValueError, match=r"save: path must name a file; got '.*/', which is a folder or a device"):
        save({"a": 2}, f"{tmp_path}/{path}")
    assert (os.listdir(tmp_path), load(tmp_path / "old.pt")) == (["old.pt"], {"a": 1})


# How a file is replaced.


def test_pipe_or_folder_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(ValueError, match=r"save: path must name a file; got .* a folder or a device"):
            save({}, tmp_path / name)
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]


def test_name_too_long_for_the_system_is_an_os_error_that_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="too long"):
        save({}, tmp_path / ("n" * 256))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", FORMATS)
def test_link_stays_a_link_and_the_file_is_one_that_open_would_make(name: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / name).symlink_to(tmp_path / "data" / "real")
    save({"w": torch.ones(1)}, tmp_path / name)
    save({"w": torch.zeros(1)}, tmp_path / name)
    assert (tmp_path / name).is_symlink()
    assert_same(load(tmp_path / name), {"w": torch.zeros(1)})
    (tmp_path / "plain").touch()
    assert (tmp_path / "data" / "real").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert os.listdir(tmp_path / "data") == ["real"]


@pytest.mark.parametrize("name", FORMATS)
def test_file_is_on_disk_before_it_gets_the_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    save({"w": torch.ones(1000)}, tmp_path / name)
    file = (tmp_path / name).stat()
    assert calls == [("sync", file.st_ino, file.st_size), ("replace", file.st_ino, file.st_size)]


@pytest.mark.parametrize("name", FORMATS)
def test_full_disk_is_an_os_error_that_leaves_the_old_file_alone(name: str, tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, tmp_path / name)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, limits[1]))  # the write that crosses it fails
    try:
        with pytest.raises(OSError, match=r"save: .*File too large"):
            save({"v": torch.ones(10), "w": torch.ones(2**20)}, tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == [name]
    assert_same(load(tmp_path / name), {"w": torch.ones(2)})


@pytest.mark.parametrize("name", FORMATS)
def test_interrupted_save_leaves_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"w": torch.ones(2)}, tmp_path / name)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    for where in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, where, interrupt)
            with pytest.raises(KeyboardInterrupt):
                save({"w": torch.zeros(2)}, tmp_path / name)
        assert os.listdir(tmp_path) == [name]
        assert_same(load(tmp_path / name), {"w": torch.ones(2)})


def test_torch_save_that_fails_midway_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "checkpoint.pt"
    save({"w": torch.ones(2)}, file)
    written: list[str] = []

    def fail(saved: object, stream: Any) -> None:
        stream.write(b"half a file")
        stream.flush()
        written.extend(os.listdir(tmp_path))
        raise RuntimeError("midway")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(RuntimeError, match="midway"):
        save({"w": torch.zeros(2)}, file)
    assert len(written) == 2
    assert os.listdir(tmp_path) == [file.name]
    assert_same(load(file), {"w": torch.ones(2)})


def test_missing_folder_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"save: the folder of path must exist: create it with os.makedirs: '.*out'"
    ):
        save({}, tmp_path / "out" / "checkpoint.pt")


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
        # safetensors has a temporary file too, at first.
        assert all(re.fullmatch(rf"{re.escape(file.name)}\.[0-9a-f]{{8}}\.part|\.tmp\w{{6}}", entry) for entry in left)
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
    assert next(call for call in itertools.count(1) if not killed(functools.partial(at_call, call))) > 10
    assert found == {(False, False), (False, True), (True, False)}
    size = file.stat().st_size
    assert all(killed(functools.partial(at_byte, byte)) for byte in range(0, size, size // 8))


#: The modules through which Python calls the system.
SYSTEM = ("posix", "io", "_io")


@pytest.mark.thorough(keep=1)
@pytest.mark.processes
@pytest.mark.parametrize("name", FORMATS)
def test_kill_at_any_moment_leaves_a_whole_checkpoint(name: str, tmp_path: Path) -> None:
    program = f"from tests.io.test_checkpoint_files import saves_that_die as run; run({str(tmp_path / name)!r})"
    # A process of its own, whose forks are safe: it has one thread.
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Tag:
    """An object that only code could make."""


def _tagged() -> Any:
    weight: Any = torch.nn.Parameter(torch.ones(2))
    weight.tag = Tag()
    return weight


@pytest.mark.parametrize("value", [b"", 2**2040, _tagged()], ids=["empty bytes", "long", "tagged parameter"])
def test_what_only_writing_shows_is_refused_before_the_old_file_is_replaced(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    save({"w": torch.ones(2)}, path)
    with pytest.raises(TypeError, match="save: saved must hold what load can read back"):
        save({"x": value}, path)
    assert_same(load(path), {"w": torch.ones(2)})
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_a_private_file_stays_private(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    save({"w": torch.ones(2)}, path)
    path.chmod(0o600)
    save({"w": torch.zeros(2)}, path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_format_is_the_files_not_the_links(tmp_path: Path) -> None:
    (tmp_path / "a.pt").symlink_to(tmp_path / "b.safetensors")
    save({"w": torch.ones(2)}, tmp_path / "a.pt")
    assert_same(load(tmp_path / "b.safetensors"), {"w": torch.ones(2)})
    assert_same(load(tmp_path / "a.pt"), {"w": torch.ones(2)})
