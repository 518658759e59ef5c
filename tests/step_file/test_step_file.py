"""A step in a file: it goes on bit for bit where the one that was saved would, and what is refused."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from funcamp import (
    chain,
    clone,
    init,
    jit,
    load_step,
    make_train_step,
    module_loss,
    save,
    stateless,
    unscale_and_check,
    update,
)
from funcamp._step_file import file, machine
from tests.support.helpers import assert_same, one_thread
from tests.support.launch import ROOT
from tests.support.models import cnn, mlp, tied
from tests.support.steps import SGD, assert_as_eager, build

pytestmark = pytest.mark.compiled

ADAMW = stateless(torch.optim.AdamW, lr=lambda applied: 0.01 / (1 + applied))


class Table(nn.Module):
    """Reads a table that is no buffer, and returns an auxiliary output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.table = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) * self.table
        x[:, 0] = 7
        return x


def by_hand() -> tuple[Any, Any, list[Any]]:
    """A step of the scaler's functions, on a state that is a dict."""

    def step(state: Any, batch: Any) -> Any:
        grads, scaler = unscale_and_check(state["scaler"], {"w": state["w"] * batch["x"].mean()})
        w = torch.where(scaler.found_inf > 0, state["w"], state["w"] - 0.1 * grads["w"])
        return {"w": w, "scaler": update(scaler)}, {"name": "by hand", "norm": grads["w"].norm(), "nothing": None}

    batches = [{"x": torch.full((3,), value), "kind": "plain", "none": None} for value in (1.0, float("inf"), 2.0)]
    return step, {"w": torch.ones(4), "scaler": init()}, batches


def trained(task: Any, optimizer: Any = ADAMW, *, steps: int = 4, stacked: int = 0, **options: Any) -> Any:
    step = build(task, optimizer, **options)
    batches = [task.batch(number) for number in range(steps)]
    if batches[0][0].is_floating_point():
        batches[2][0].fill_(float("inf"))
    if stacked:
        parts = [batches[first : first + stacked] for first in range(0, steps, stacked)]
        batches = [tuple(map(torch.stack, zip(*part))) for part in parts]
    return step, step.init(), batches


#: A step, its first state, and batches; with the options of `jit`.
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "a step by hand": (by_hand, {}),
    "dropout, a skip, an average": (lambda: trained(mlp(0.3), ema_decay=0.9, max_norm=1.0), {}),
    "buffers, accumulation": (lambda: trained(cnn(), SGD, accumulate=2, stacked=2), {}),
    "ties, a chain, tensor by tensor": (lambda: trained(tied(), chain(ADAMW)), {"donate": False}),
    "several steps in a call": (lambda: trained(mlp(0.3), steps=8, stacked=4), {"unroll": 4}),
    "several steps, a loop in Python": (lambda: trained(mlp(), steps=8, stacked=4), {"unroll": 4, "donate": False}),
}


@pytest.mark.inductor
@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize("case", CASES)
def test_a_step_from_a_file_computes_the_same_bits(case: str, tmp_path: Path) -> None:
    make, options = CASES[case]
    step, state, batches = make()
    run = jit(step, **options)
    path = tmp_path / "step.pt"
    with one_thread():
        run(clone(state), batches[0])
        run.save(path, example_state=state)
        loaded = load_step(path)
        assert_same(loaded.example_state, state)
        metrics = assert_as_eager(run, loaded, state, batches)
    assert type(metrics[0]) is type(run(clone(state), batches[0])[1])
    with pytest.raises(
        ValueError, match=r"must be like one of those in the file: .*got float32\[1\], where its struct"
    ):
        loaded(clone(state), torch.ones(1))
    with pytest.raises(RuntimeError, match=r"got load_step.*copy its file"):
        loaded.save(path)


@pytest.mark.inductor
@pytest.mark.thorough
def test_tensors_besides_the_arguments_two_signatures_and_an_evaluation_on_the_same_state(tmp_path: Path) -> None:
    model = Table()
    step = make_train_step(lambda params, batch: torch.func.functional_call(model, params, batch).square().mean(), SGD)
    state = step.init(dict(model.named_parameters()))
    run = jit(step)  # save compiles the second signature
    evaluate = run.also(lambda state, batch: (state, state.params["layer.weight"].sum() * batch.sum()))
    batches = [torch.ones(2, 4), torch.ones(3, 4), torch.ones(2, 4)]
    with one_thread():
        for batch in batches[:2]:
            run(clone(state), batch)
        evaluate(clone(state), batches[0])
        run.save(tmp_path / "train.pt")
        evaluate.save(tmp_path / "evaluate.pt")
        loaded = load_step(tmp_path / "train.pt")
        loaded_evaluation = load_step(tmp_path / "evaluate.pt", also=loaded)
        assert loaded.example_state is None
        assert_as_eager(run, loaded, state, batches)
        own, theirs = clone(state), clone(state)
        for batch in batches:
            own, _ = run(own, batch)
            version = theirs.params.groups[0]._version
            theirs, _ = loaded(theirs, batch)
            group = theirs.params.groups[0]
            memory, written = group.data_ptr(), group._version
            assert written > version
            own, expected = evaluate(own, batches[0])
            theirs, found = loaded_evaluation(theirs, batches[0])
            assert_same(found, expected)
            assert (group.data_ptr(), group._version) == (memory, written)
    assert_same(theirs, own)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="where the autocast around the call"):
        loaded(theirs, batches[0])  # of the first signature in the file, not the last


GO_ON = """
import sys, torch, funcamp
torch.set_num_threads(1)
path = sys.argv[1]
run = funcamp.load_step(path)
assert "tests" not in sys.modules
state = run.load_state_dict(funcamp.load(path + ".checkpoint"), like=run.example_state)
torch.manual_seed(1)
for batch in torch.load(path + ".batches"):
    state, metrics = run(state, batch)
torch.save((run.state_dict(state), metrics.loss, metrics.skipped), path + ".there")
"""


@pytest.mark.inductor
@pytest.mark.processes
def test_another_process_goes_on_without_the_code_of_the_model(tmp_path: Path) -> None:
    path = str(tmp_path / "step.pt")
    step, state, batches = trained(mlp(0.2), SGD)
    run = jit(step)
    with one_thread():
        state, _ = run(state, batches[0])
        run.save(path, example_state=state)
        save(step.state_dict(state), f"{path}.checkpoint")
        torch.save(batches, f"{path}.batches")
        # No compiler, and nothing compiled.
        there = {"PYTHONPATH": str(ROOT), "PATH": "", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "empty")}
        subprocess.run([sys.executable, "-c", GO_ON, path], env={**os.environ, **there}, check=True)
        torch.manual_seed(1)
        for batch in batches:
            state, metrics = run(state, batch)
    assert metrics.skipped == 1
    assert_same(torch.load(f"{path}.there"), (step.state_dict(state), metrics.loss, metrics.skipped))


class Kept:
    """An object in a batch."""


def add(state: Any, batch: Any) -> Any:
    return {"w": state["w"] + batch["x"].sum()}, None


def test_what_cannot_be_in_a_file_is_refused_by_save(tmp_path: Path) -> None:
    path = tmp_path / "step.pt"
    run = jit(add, backend="eager")
    with pytest.raises(RuntimeError, match="save: step must have been called"):
        run.save(path)
    run({"w": torch.ones(())}, {"x": torch.ones(2)})
    with pytest.raises(RuntimeError, match=r"save: step must be compiled by Inductor.*one by one"):
        run.save(path)
    with pytest.raises(ValueError, match="example_state must have the shapes"):
        run.save(path, example_state={"w": torch.ones(3)})
    assert not path.exists()


def test_only_the_programs_for_the_present_values_in_python_are_saved(tmp_path: Path) -> None:
    dropout = nn.Dropout()
    step = make_train_step(module_loss(nn.Sequential(nn.Linear(2, 2), dropout), nn.functional.mse_loss), SGD)
    run = jit(step, backend="eager")
    run(step.init(), (torch.ones(1, 2), torch.ones(1, 2)))
    dropout.p = 0.1
    with pytest.raises(RuntimeError, match=r"the values that its Python has now"):
        run.save(tmp_path / "step.pt")


def test_a_class_of_the_user_is_refused_by_name() -> None:
    description = file.Description(None, Kept(), [], None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"save: the state, the batch and the metrics must be .*test_step_file\.Kept"):
        file._pickled(description, [])


class Planted:
    """What a pickle with code in it would be."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit",)


def test_a_pickle_in_a_file_runs_no_code() -> None:
    planted = pickle.dumps(Planted())
    reader = file._Unpickler(file._as_bytes(file._as_tensor(planted)), [])
    with pytest.raises(pickle.UnpicklingError, match=r"builtins\.exec"):
        reader.load()


def test_another_machine_and_another_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine.this_machine(has_gpu=False)
    machine.check_machine(here)
    for name, other in (("torch", "2.0"), ("Python", "3.1"), ("system", "Plan9"), ("GPU", "sm_90")):
        with pytest.raises(ValueError, match=f"load_step: path must be .* needs {name} {other}"):
            machine.check_machine({**here, name: other})
    monkeypatch.setattr(machine, "_instructions", lambda: {"sse"})
    with pytest.raises(ValueError, match="lacks: avx, fma: make the file again"):
        machine.check_machine({**machine.this_machine(has_gpu=False), "processor": ["avx", "fma", "sse"]})
    checkpoint, text, damaged = (tmp_path / name for name in ("checkpoint.pt", "text.pt", "damaged.pt"))
    torch.save({"w": torch.ones(2)}, checkpoint)
    text.write_text("no step")
    content = bytearray(checkpoint.read_bytes())
    content[content.index(torch.ones(2).numpy().tobytes())] ^= 1
    damaged.write_bytes(content)
    module = tmp_path / "module.pt"
    torch.save(nn.Linear(2, 2), module)
    for path, words in (
        (checkpoint, "in format None"),
        (module, "in format None"),
        (text, "another file"),
        (damaged, "is damaged"),
    ):
        with pytest.raises(ValueError, match=rf"load_step: path must be a file that run\.save.*{path.name}.*{words}"):
            load_step(path)
    with pytest.raises(FileNotFoundError):
        load_step(tmp_path / "missing.pt")
    with pytest.raises(TypeError, match="load_step: also must be a step of jit"):
        load_step(tmp_path / "missing.pt", also=add)  # type: ignore[arg-type]
