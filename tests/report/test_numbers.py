"""`numerics_report`: every operation, where non-finite values come from, and the scale it recommends."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import funcamp
from funcamp import ScalerConfig, init, jit, make_train_step, module_loss, stateless, unscale_and_check, update
from funcamp.__main__ import main
from funcamp.numerics import Record, stats, track_scales
from funcamp.report import annotate, numerics_report, plot_flushed
from funcamp.report.mode import Mode
from funcamp.report.numbers.recorder import Recorder
from tests.support.helpers import assert_close, assert_same
from tests.support.models import Block, mlp, tied

SGD = stateless(torch.optim.SGD, lr=0.1)


def forward(report: Any) -> list[str]:
    return [one.name for one in report.operations if not one.backward]


def test_every_operation_of_both_passes_is_seen() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    report = numerics_report(lambda: F.mse_loss(model(x), y))
    assert [(one.name, one.path) for one in report.operations if not one.backward] == [
        ("addmm", "0"),
        ("tanh", "1"),
        ("addmm", "2"),
        ("mse_loss", ""),
    ]
    backward = [(one.name, one.path, one.shape) for one in report.operations if one.backward]
    assert backward == [
        ("mse_loss_backward", "", (3, 2)),
        ("mm", "2", (3, 8)),
        ("mm", "2", (2, 8)),
        ("sum", "2", (1, 2)),
        ("tanh_backward", "1", (3, 8)),
        ("mm", "0", (8, 4)),
        ("sum", "0", (1, 8)),
    ]
    assert_same(report.operations[0].stats.row, stats(model[0](x)).row)
    assert all(value.grad is None for value in model.parameters())
    assert not any(part._forward_hooks for part in model.modules())
    assert repr(report) == "NumericsReport(4 forward, 7 backward operations)"


def loss_of(model: nn.Module, x: Tensor) -> Any:
    return lambda p: functional_call(model, p, (x,)).square().mean()


def test_the_same_operations_under_torch_func_vmap_and_in_a_step() -> None:
    model, x = mlp().model, torch.randn(3, 8)
    params = {name: value.detach() for name, value in model.named_parameters()}
    plain = numerics_report(lambda: model(x).square().mean())
    func = numerics_report(lambda p: grad(loss_of(model, x))(p), params)
    assert forward(func) == forward(plain)
    assert sorted(one.name for one in func.operations) == sorted(one.name for one in plain.operations)
    assert {one.path for one in func.operations} == {one.path for one in plain.operations}
    samples = numerics_report(lambda p: vmap(lambda x: grad(loss_of(model, x))(p))(x[:, None]), params)
    assert samples.records[""].forward.count == 12


@pytest.mark.compiled
@pytest.mark.parametrize("compiled", [False, True], ids=["pure", "jit"])
def test_report_of_a_training_step(compiled: bool) -> None:
    task = mlp()
    step = make_train_step(module_loss(task.model, task.criterion), SGD, ScalerConfig(2.0**12), policy="float16")
    run: Any = jit(step) if compiled else step
    report = numerics_report(run, step.init(), task.batch(0))
    assert report.loss_scale == 2.0**12
    assert {one.dtype for one in report.operations if one.name == "addmm"} == {torch.float16}
    plain = numerics_report(lambda: task.criterion(task.model(task.batch(0)[0]), task.batch(0)[1]))
    ours, theirs = report.unscaled_records(), plain.records
    for path in theirs:
        assert_close(ours[path].backward.std, theirs[path].backward.std, 2e-2)
    assert not compiled or run.programs == 0


def test_the_optimizer_of_a_step_is_left_out_wherever_it_is_called() -> None:
    task = mlp()
    step = make_train_step(module_loss(task.model, task.criterion), SGD)

    def fn(state: Any) -> Tensor:
        for number in range(2):  # the operands of a layer that is called again are summed, which is no operation
            state, metrics = step(state, task.batch(number))
        return metrics.loss * 3

    report, direct = numerics_report(fn, step.init()), numerics_report(step, step.init(), task.batch(0))
    names = [(one.name, one.path) for one in direct.operations]
    assert not direct.operations[-1].name.startswith("_foreach")
    assert [(one.name, one.path) for one in report.operations] == [*names, *names, ("mul", "")]
    assert (report.loss_scale, len(report.passes)) == (2.0**16, 2)


def test_a_scale_that_nothing_multiplies_by_is_not_the_factor_of_the_loss() -> None:
    report = numerics_report(lambda state, w: (w * state.growth_tracker).sum(), init(), torch.ones(2))
    assert report.loss_scale == 1.0
    by_hand = numerics_report(lambda state, w: (w * state.scale).sum(), init(), torch.ones(2), loss_scale=2.0**16)
    assert by_hand.loss_scale == 2.0**16


def test_memory_that_nothing_has_written_is_not_counted() -> None:
    def fn(x: Tensor) -> Tensor:
        memory = [
            torch.empty(2), torch.empty_like(x), x.new_empty(2), x.new_empty_strided((2,), (1,)),
            torch.empty_strided((2,), (1,)), torch.empty_permuted((2,), (0,)), torch.empty(0).resize_(2),
            torch.empty(0).resize_as_(x), torch.empty(0).set_(torch.UntypedStorage(8), 0, (2,), (1,)),
        ]  # fmt: skip
        return sum([x, *(one.zero_() for one in memory)], x).sum()

    assert forward(numerics_report(fn, torch.ones(2))) == ["zero_"] * 9 + ["add"] * 10 + ["sum"]


def test_records_are_those_of_track_scales() -> None:
    task = tied()
    x, y = task.batch(0)
    report = numerics_report(lambda: task.criterion(task.model(x), y), module=task.model)
    tracked = track_scales(task.model, lambda *_: True)
    params = {name: value.detach() for name, value in task.model.named_parameters()}
    records = grad(lambda q: task.criterion(tracked(params, q, x), y))(tracked.probes())
    assert set(records) == set(report.records)
    for path, record in records.items():
        assert record.forward.count > 0
        assert_close(
            [record.forward.row, record.backward.row],
            [report.records[path].forward.row, report.records[path].backward.row],
            1e-6,
        )


class Planted(nn.Module):
    """A block after which an operation overflows float16, or divides by zero."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.block, self.scores, self.how = Block(8), nn.Linear(8, 8), how

    def forward(self, x: Tensor) -> Tensor:
        x = self.scores(self.block(x))
        if self.how == "overflow":
            return (x.half() * 60000 * 60000).float()
        if self.how == "log":
            return torch.log(x * 0)
        if self.how == "backward":
            return torch.sqrt(x * 0)
        mask = torch.ones(8, dtype=torch.bool)
        if self.how == "mask":
            mask[:4] = False
        return torch.softmax(x.masked_fill(mask, -torch.inf), -1)


@pytest.mark.parametrize(
    ("how", "kind", "name", "backward"),
    [
        ("overflow", "inf", "mul", False),
        ("log", "inf", "log", False),
        ("backward", "inf", "div", True),
        ("all masked", "NaN", "_softmax", False),
    ],
)
def test_operation_planted_to_fail_is_named(how: str, kind: str, name: str, backward: bool) -> None:
    model = Planted(how)
    report = numerics_report(lambda: model(torch.randn(2, 3, 8)).sum(), module=model)
    origin = report.first_nonfinite()
    assert origin is not None
    assert (origin.kind, origin.operation.name, origin.operation.backward) == (kind, name, backward)
    assert origin.operation.path == ""
    assert f"{kind} first in {name}" in str(origin)
    assert f"Non-finite values: {kind} first in {name}" in report.summary()[1]


def test_a_mask_is_no_overflow_and_a_bad_weight_is_named_where_it_is_used() -> None:
    model = Planted("mask")
    assert numerics_report(lambda: model(torch.randn(2, 3, 8)).sum()).first_nonfinite() is None
    with torch.no_grad():
        model.block.up.weight.mul_(1e38).mul_(10.0)
    origin = numerics_report(lambda: model(torch.randn(2, 3, 8)).sum()).first_nonfinite()
    assert origin is not None
    assert origin.operation.path == "block.up"


def test_other_roots_have_names_of_their_own() -> None:
    model, criterion = nn.Sequential(nn.Linear(4, 4)), nn.MSELoss()
    report = numerics_report(lambda: criterion(model(torch.randn(2, 4)), torch.randn(2, 4)), module=model)
    assert {path: record.forward.count.item() for path, record in report.records.items()} == {
        "0": 8,
        "": 8,
        "<MSELoss>": 1,
    }
    assert report.annotate().splitlines()[-1].startswith("<MSELoss>")
    others = numerics_report(lambda: nn.Sequential(nn.ReLU())(nn.Sequential(nn.Linear(4, 4))(torch.randn(2, 4))).sum())
    assert set(others.records) == {"0", "", "<Sequential>.0", "<Sequential>"}


def test_checkpointed_layers_are_seen_once() -> None:
    layer = nn.Linear(4, 4)
    report = numerics_report(lambda: checkpoint(layer, torch.randn(2, 4), use_reentrant=False).sum())
    assert forward(report) == ["addmm", "sum"]
    assert report.records[""].forward.count == report.records[""].backward.count == 8


def test_predicted_flush_is_what_half_does() -> None:
    x = torch.randn(1000).exp() * 1e-7
    report = numerics_report(lambda w: (w * x).sum(), torch.ones(1000, requires_grad=True))
    row = report.to_rows()[0]
    assert row["underflow"] == pytest.approx((x.half() == 0).double().mean().item())
    assert report.gradients().underflow(torch.float16, 2.0**4).item() == pytest.approx(
        ((x * 16).half() == 0).double().mean().item()
    )


def test_rows_table_and_tree() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    report = numerics_report(lambda: (model(torch.randn(3, 4)) * 1e-9).sum(), module=model)
    rows = report.to_rows()
    assert [row["index"] for row in rows] == list(range(len(rows)))
    assert rows[0] == rows[0] | {"direction": "forward", "module": "0", "operation": "addmm", "dtype": "float32"}
    assert rows[-1]["underflow"] > 0.9
    assert len(report.table().splitlines()) == 2 + len(rows)
    tree = report.annotate().splitlines()
    assert tree[0].startswith("Sequential ")
    assert tree[1].startswith("  (0): Linear(in_features=4, out_features=8, bias=True)  (-> 0.")
    assert tree[1].endswith("e-10)")
    assert annotate(None, {"layer": Record(stats(torch.ones(2)), stats(torch.ones(1)))}) == "layer  (-> 0, <- n/a)"


def test_a_report_is_drawn(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    report = numerics_report(lambda: (model(torch.randn(3, 4)) / 0).sum(), module=model)
    for modules in (False, True):
        assert report.plot(tmp_path / "plot.png", modules=modules).read_bytes()[:4] == b"\x89PNG"


def test_heat_map_of_layers_over_steps(tmp_path: Path) -> None:
    task = mlp()
    step = make_train_step(track_scales(module_loss(task.model, task.criterion)), SGD)
    state, history = step.init(), []
    for index in range(3):
        state, metrics = step(state, task.batch(index))
        history.append((index, metrics.records))
    assert plot_flushed(history, tmp_path / "map.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="plot_flushed: history must hold a step"):
        plot_flushed([], tmp_path / "map.png")
    with pytest.raises(ValueError, match="same layers at every step; step 1 differs"):
        plot_flushed([history[0], (1, {})], tmp_path / "map.png")


SCRIPT = """
import sys
import torch
from torch import nn

print("began", sys.argv[1:])
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.no_grad():
    model(torch.ones(2, 4)).exp()
run = torch.compile(model)
for index in range(5):
    opt.zero_grad()
    loss = run(torch.randn(3, 4)).square().mean() * (10.0 ** index)
    loss.backward()
    opt.step()
print("ended")

def one_step():
    return model(torch.ones(2, 4)).sum()
"""


def test_command_records_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ["--out", str(tmp_path / "out"), "--first", "2", "--watch", "2"]
    assert main(["report", *options, str(script), "--", "--flag", "7"]) == 0
    said = capsys.readouterr().out
    assert "began ['--flag', '7']" in said
    assert "ended" not in said
    assert "(0): Linear(in_features=4, out_features=8, bias=True)  (-> 0." in said
    text = (tmp_path / "out" / "report.txt").read_text()
    assert text.count("addmm") == 2
    assert "exp" not in text
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"report.txt", "report.png"}


def test_command_knows_the_scale_and_drops_what_came_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(4, 4)\nbefore = torch.ones(3).sin()\n"
        "scaler = torch.amp.GradScaler('cpu', init_scale=2.0**20)\n"
        "with torch.autocast('cpu', torch.float16):\n    loss = model(torch.ones(2, 4)).float().sum()\n"
        "scaler.scale(loss).backward()\nbefore.exp()\n"
    )
    assert main(["report", "--out", str(tmp_path / "out"), str(script)]) == 0  # 2^20 overflows, which a scaler corrects
    said = capsys.readouterr().out
    assert "Loss scale in this run: 1048576 (2^20)." in said
    assert "Non-finite values: inf first in _to_copy (backward" in said
    text = (tmp_path / "out" / "report.txt").read_text()
    assert "addmm" in text
    assert "uniform_" not in text
    assert "sin" not in text
    report = numerics_report(
        lambda: funcamp.GradScaler("cpu", init_scale=8.0).scale(torch.ones(2, requires_grad=True).sum())
    )
    assert report.loss_scale == 8.0


@pytest.mark.parametrize("ending", ["raise ArithmeticError('not finite')", "sys.exit(0)", "sys.exit('no')"])
def test_command_reports_of_a_script_that_ends_early(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys\nimport torch\nloss = (torch.ones(2, requires_grad=True) / 0).sum()\nloss.backward()\n{ending}\n"
    )
    with pytest.raises((ArithmeticError, SystemExit)):
        main(["report", str(script), "--out", str(tmp_path / "out"), "--first", "1"])
    assert "inf first in div" in capsys.readouterr().out
    assert (tmp_path / "out" / "report.txt").exists()


@pytest.mark.thorough(keep=1)
@pytest.mark.parametrize(
    ("text", "frames"),
    [
        ("def f():\n    raise ValueError('mine')\n\nf()\n", ["<module>", "f"]),
        ("import torch\ntorch.ones(1, requires_grad=True).sum().backward()\nraise ValueError('mine')\n", ["<module>"]),
        ("def f(:\n", []),
    ],
)
def test_the_traceback_of_a_script_starts_with_the_script(text: str, frames: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    target = [str(script), "--out", str(tmp_path / "out")]
    ran = subprocess.run([sys.executable, "-m", "funcamp", "report", *target], capture_output=True, text=True)
    assert ran.returncode == 1
    found = re.findall(r'File "(.*)", line .*, in (.*)', ran.stderr)
    assert [place for file, place in found if file == str(script)] == frames
    assert found[: len(frames)] == [(str(script), place) for place in frames]
    assert len(found) == len(frames)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "there is none at nowhere.py"),
        (["--first", "0", "x.py"], "--first must be 1 or more"),
        (["x.py", "--flag"], "unrecognized arguments: --flag"),
        (["-m", "no.such.module"], "target must name a module"),
        (["--watch", "0", "x.py"], "--watch must be 1 or more"),
        (["--loss-scale", "-1", "x.py"], "--loss-scale must be a positive number"),
    ],
)
def test_command_says_what_is_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        main(["report", "--out", str(tmp_path), *arguments])
    assert message in capsys.readouterr().err


def test_bad_input_is_named() -> None:
    with pytest.raises(TypeError, match="numerics_report: fn must be callable; got 3"):
        numerics_report(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="numerics_report: module must be a torch"):
        numerics_report(lambda: torch.ones(1) * 2, module=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="numerics_report: loss_scale must be a positive number; got -1"):
        numerics_report(lambda: torch.ones(1) * 2, loss_scale=-1)
    with pytest.raises(RuntimeError, match="must run operations on floating-point tensors"):
        numerics_report(lambda: None)
    report = numerics_report(lambda: torch.ones(2) * 2)
    with pytest.raises(ValueError, match="must have finite, nonzero gradients"):
        report.recommend_scale()
    with pytest.raises(ValueError, match="headroom must be a positive number; got 0"):
        report.recommend_scale(headroom=0)
    with pytest.raises(TypeError, match="dtype must be one of"):
        report.to_rows(torch.int8)
    with pytest.raises(ZeroDivisionError):
        numerics_report(lambda: 1 / 0)
    assert torch.nn.modules.module._global_forward_hooks == {}
    assert_same(unscale_and_check(init(), {"w": torch.ones(1)})[0], {"w": torch.ones(1) / 2.0**16})
    assert update(init()).scale == 2.0**16


def penalized(*, recorded: bool) -> list[Tensor]:
    """Parameters after steps on a gradient penalty, whose backward pass is differentiated."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Sequential(nn.Linear(32, 32), nn.Tanh()), nn.Linear(32, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        x = torch.randn(64, 6)
        mode = Mode()
        watching = Recorder(mode, passes=2).watching() if recorded else contextlib.nullcontext()
        with watching, mode:
            loss = model(x).square().mean()
            inner = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            sgd.zero_grad()
            (loss + torch.stack([gradient.square().sum() for gradient in inner]).sum().sqrt()).backward()
        sgd.step()
    return list(model.parameters())


def test_a_recording_changes_no_bit_of_a_differentiated_backward_pass() -> None:
    assert_same(penalized(recorded=True), penalized(recorded=False))


def test_the_gradient_of_an_output_that_is_written_in_place_is_that_before() -> None:
    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice = Doubling()
            self.same = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            total: Tensor = self.same(x) + x + self.twice(x).mul_(8)
            return total

    x, root = torch.ones(4, requires_grad=True), Root()
    report = numerics_report(lambda: root(x * 1).sum())
    assert report.records["twice"].forward.amax == 2
    assert report.records["twice"].backward.amax == 8
