"""`python -m funcamp report` changes nothing of a script: its numbers, its hooks' calls, its errors and its files."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from funcamp.__main__ import main
from tests.support.helpers import assert_same

BEFORE = """
import sys
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
counts = [0]
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
batches = [(torch.randn(4, 6), torch.randn(4, 1)) for _ in range(4)]


def step(model, optimizer, loss):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def train(model, run=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        with torch.autocast("cpu", torch.float16):
            loss = mse_loss((run or model)(x), y)
        step(model, optimizer, loss)


def count(*_):
    counts[0] += 1


model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
"""

#: Each trains `model`, and counts in `counts` what must not happen more often.
SCRIPTS = {
    "spectral_norm": """
model[0] = nn.utils.parametrizations.spectral_norm(model[0])
train(model)
""",
    "checkpoint_with_batch_norm": """
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
train(model, lambda x: checkpoint(model, x, use_reentrant=False))
""",
    "reentrant_checkpoint": """
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
train(model, lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=True))
""",
    "first_without_gradients": """
def run(x):
    with torch.no_grad():
        model(x)
    return model(x)


train(model, run)
""",
    "hooks_that_draw": """
for parameter in model.parameters():
    parameter.register_hook(lambda gradient: gradient * torch.rand(()))
train(model)
""",
    "hooks_that_count": """
model[0].weight.register_hook(count)
model[1].register_full_backward_hook(count)


def run(x):
    outputs = model(x)
    outputs.register_hook(count)
    return outputs


train(model, run)
""",
    "function_that_draws": """
class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        count()
        return gradient + torch.randn_like(gradient)


train(model, lambda x: Noise.apply(model(x)))
""",
    "second_backward_raises": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in batches:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = scaler.scale(mse_loss(model(x), y))
    loss.backward()
    try:
        loss.backward()
    except RuntimeError:
        count()
    scaler.step(optimizer)
    scaler.update()
""",
    "own_modes": """
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        count()
        return function(*args, **(kwargs or {}))


optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in batches:
    optimizer.zero_grad()
    with Operations():
        loss = mse_loss(model(x), y)
        loss.backward()
    optimizer.step()
""",
    "positional_inputs": """
optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
of_the_rest = torch.optim.SGD(model[2].parameters(), lr=0.1)  # never stepped: no pass reaches it
for x, y in batches:
    optimizer.zero_grad()
    torch.autograd.backward(mse_loss(model(x), y), None, None, False, None, list(model[0].parameters()))
    optimizer.step()
""",
    "traced_before": """
torch.jit.trace(model, batches[0][0])
train(model)
""",
    "fake_before": """
from torch._subclasses.fake_tensor import FakeTensorMode

with FakeTensorMode():
    nn.Linear(6, 8)(torch.randn(4, 6))
train(model)
""",
    "fast_path_of_an_encoder": """
layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
encoder = nn.TransformerEncoder(layer, 1).eval()
padding = torch.tensor([[False, False, True], [False, False, False]])
with torch.no_grad():
    encoder.half()(torch.randn(2, 3, 8).half(), src_key_padding_mask=padding)
train(model)
""",
    "rows_of_a_jacobian": """
for x, _ in batches:
    outputs = scaler.scale(model(x).flatten())
    torch.vmap(lambda row: torch.autograd.grad(outputs, model[0].weight, row, retain_graph=True))(torch.eye(4))
train(model)
""",
    "in_a_thread": """
import threading

thread = threading.Thread(target=train, args=(model,))
thread.start()
thread.join()
""",
    "pickled_functions": """
import pickle

pickle.dumps([torch.save, torch.load, nn.utils.clip_grad_norm_])
train(model)
""",
}
AFTER = """
torch.save([*model.parameters(), *model.buffers(), torch.tensor(counts)], sys.argv[1])
"""


@pytest.mark.filterwarnings("ignore:.*nested:UserWarning", "ignore:.*reentrant:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_computes_and_calls_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(BEFORE + SCRIPTS[name] + AFTER)
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "plain.pt")])
    runpy.run_path(str(script), run_name="__main__")
    assert main(["report", "--strict", str(script), "--", str(tmp_path / "reported.pt")]) == 0
    assert "The loop: 0 mistakes in " in capsys.readouterr().out
    assert_same(torch.load(tmp_path / "reported.pt"), torch.load(tmp_path / "plain.pt"))


def run(script_text: str, tmp_path: Path, *options: str) -> int:
    """The exit status of the command for a script."""
    script = tmp_path / "train.py"
    script.write_text(BEFORE + script_text)
    return main(["report", "--strict", *options, str(script)])


def test_the_script_may_change_folder_and_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(
        f"{BEFORE}import os\nos.chdir('elsewhere')\nopen(__file__).close()\nsys.stdout = open(os.devnull, 'w')\n"
        "train(model)\nsys.stdout.close()\n"
    )
    assert main(["report", "train.py"]) == 0
    assert "The loop: 0 mistakes in 4 backward passes." in capsys.readouterr().out


@pytest.mark.compiled
def test_torch_compile_knows_torchs_functions_afterwards(tmp_path: Path) -> None:
    """It keeps a table of them, and a report may run when the table is made."""
    torch.compiler.reset()
    torch._dynamo.trace_rules.clear_lru_cache()  # as in a new process
    assert run("train(torch.compile(model))", tmp_path) == 0
    assert torch.autograd.grad in torch._dynamo.trace_rules.get_torch_obj_rule_map()


def test_a_script_that_is_cut_ends_in_its_own_way(tmp_path: Path) -> None:
    script_text = f"""
try:
    train(model)
finally:
    torch.optim.SGD(model.parameters()).zero_grad()
    torch.save(model.state_dict(), {str(tmp_path / "last.pt")!r})
"""
    assert run(script_text, tmp_path, "--watch", "2") == 0
    assert (tmp_path / "last.pt").exists()


@pytest.mark.processes
def test_a_forked_process_is_not_cut(tmp_path: Path) -> None:
    script_text = f"""
import os

train(model)
process = os.fork()
if not process:
    train(model)
    torch.save(model.state_dict(), {str(tmp_path / "forked.pt")!r})
    os._exit(0)
os.waitpid(process, 0)
"""
    script = tmp_path / "train.py"
    script.write_text(BEFORE + script_text)
    command = [sys.executable, "-m", "funcamp", "report", "--watch", "4", str(script)]
    # A fork has none of OpenMP's other threads, and torch would wait for them, also without the report.
    ran = subprocess.run(command, timeout=300, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0
    assert (tmp_path / "forked.pt").exists()
