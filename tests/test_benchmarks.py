"""What a benchmark leaves behind when a variant fails or its process is stopped, and what a GPU's run asks for."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.launch import ROOT

#: Each has a main. gpu_program.py registers a device before torch is imported, so it needs a process.
SCRIPTS = sorted({file.stem for file in (ROOT / "benchmarks").glob("[a-z]*.py")} - {"gpu_program"})


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their folder is the first that a script looks in."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


README = ROOT / "benchmarks" / "README.md"
SCRIPT_FILES = sorted((ROOT / "benchmarks").glob("[a-z]*.py"))
RESULT_FILE = re.compile(r"results/([\w-]+)\.(?:md|png)")


def rows_of_the_readme() -> list[str]:
    """The table of questions, a line for each."""
    table = README.read_text().partition("| question |")[2].partition("\n\n")[0]
    return table.splitlines()[2:]


def results_shown_in(page: Path) -> set[str]:
    return set(RESULT_FILE.findall(page.read_text()))


def test_the_readme_has_every_script_and_every_result_in_its_table() -> None:
    table = "\n".join(rows_of_the_readme())
    assert [file.name for file in SCRIPT_FILES if f"]({file.name})" not in table and file.name != "gpu.py"] == []
    assert {file.stem for file in (ROOT / "benchmarks" / "results").glob("*.md")} == set(RESULT_FILE.findall(table))


def test_the_readme_names_the_pages_that_show_a_result() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for row in rows_of_the_readme():
        *_, listed = row.rstrip(" |").split(" | ")
        results = set(RESULT_FILE.findall(row))
        showing = {page for page in pages if results & results_shown_in(page)}
        named = {(README.parent / target).resolve() for target in re.findall(r"\]\(([^)]+)\)", listed)}
        assert named == showing, row
        assert bool(named) != (listed == "no page"), row


@pytest.mark.parametrize("script", SCRIPT_FILES, ids=lambda file: file.stem)
def test_a_script_says_its_question_and_its_command(script: Path) -> None:
    text = ast.get_docstring(ast.parse(script.read_text())) or ""
    question, *_ = text.partition("\n\n")
    assert question.endswith("?") or script.stem == "gpu", question
    assert f"    python benchmarks/{script.name}" in text


def test_a_variant_that_fails_is_a_row_and_every_row_is_in_the_file(tmp_path: Path) -> None:
    timing: Any = import_module("_timing")

    def failing() -> Any:
        raise MemoryError("80 GB")

    class Late:
        calls = 0

        def __call__(self) -> None:
            self.calls += 1
            if self.calls > 5:
                raise ValueError("in a later call")

    def made(call: Any) -> Any:
        return lambda: timing.Variant(call, timing.nothing)

    columns = {"size": "size", "variant": "variant", "ms": "median_ms", "ratio": "ratio"}
    report = timing.Report(tmp_path, "x", "X", {"date": "2026-01-01"}, columns)
    makers = {"first": made(int), "absent": failing, "second": made(int)}
    report.add(timing.measured("small", makers, 2, 3, "cpu"))
    assert [row.get("failed") for row in report.rows] == [None, "MemoryError", None]
    assert all(row["ratio"] > 0 for row in report.rows[::2])

    def stopped() -> Iterator[Any]:
        yield from timing.measured("large", {"first": made(int), "late": made(Late())}, 2, 3, "cpu")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        report.add(stopped())
    lines = (tmp_path / "2026-01-01-x.md").read_text().splitlines()
    assert "| small | absent | failed: MemoryError |  |" in lines
    assert "| large | late | failed: ValueError |  |" in lines
    rows = json.loads((tmp_path / "2026-01-01-x.json").read_text())["results"]
    assert [(row["size"], row["variant"]) for row in rows] == [
        *(("small", name) for name in makers),
        ("large", "first"),
        ("large", "late"),
    ]


def test_the_gpus_run_names_sizes_and_variants_that_there_are() -> None:
    gpu, step = import_module("gpu"), import_module("step")
    for lines in gpu.PARTS.values():
        for line in lines:
            script = import_module(line.script)
            names = ["GPU_SIZES", "PROGRAM_SIZES", "SIZES"]
            if "--public" in line.options:
                names = ["PUBLIC_GPU_SIZES"]
            known = next(getattr(script, name) for name in names if hasattr(script, name))
            assert not {*line.sizes} - {*known}, line
    assert not {*gpu.PEERS, *gpu.OTHERS} - {*step.variants("cuda", forms=True)}
    assert gpu.TESTS + sum(line.seconds for part in gpu.HALF_AN_HOUR for line in gpu.PARTS[part]) <= 30 * 60
    assert max(sum(line.seconds for line in lines) for lines in gpu.PARTS.values()) <= 8 * 60
    assert {part for part, lines in gpu.PARTS.items() if not lines} == {*gpu.PROGRAMS}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_shows_its_options(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        import_module(script).main()
    assert ended.value.code == 0
    assert "--out" in capsys.readouterr().out


@pytest.mark.processes
def test_the_script_with_a_device_of_its_own_shows_its_options() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_program.py", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "--sizes" in done.stdout


def test_the_time_of_a_step_is_split_by_kernels() -> None:
    roofline = import_module("roofline")
    found = [("nvjet_hsh_128x256", 2.0), ("triton_red_fused_abs_sum_3", 0.5), ("triton_poi_fused_lerp_9", 1.0)]
    found += [("triton_poi_fused_gelu_1", 0.25), ("Memset (Device)", 0.125), ("triton_poi_fused_gelu_1", 0.25)]
    assert roofline.parts(found, 5.0) == {
        "calls of libraries": 2.0,
        "generated kernels": 2.0,
        "of them check and update": 1.5,
        "copies and fills": 0.125,
        "gaps": 0.875,
        "step": 5.0,
    }
    assert roofline.by_time(found)[2] == ("triton_red_fused_abs_sum_3", 1, 0.5)
    assert {*roofline.MODEL.values()} <= {*next(iter(roofline.modelled().values()))}
    assert {*roofline.PROGRAM_SIZES} == {*roofline.modelled()}


def test_a_row_of_reinforcement_learning_has_a_curve_of_every_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = import_module("float16_rl")
    monkeypatch.setattr(script.funcamp, "jit", lambda step: step)
    row = script.measure("engine", "float32", 2, 12)
    assert row["curves"].keys() == {"reward", "solved", "gap", "kl"}
    assert all([len(curve) for curve in curves] == [2, 2] for curves in row["curves"].values())
    assert 0 < float(row["gap"]) <= float(row["gap_max"]) < 1e-5
    assert row["skipped"] == [0, 0]
    report = SimpleNamespace(rows=[row], stem=tmp_path / "x")
    script.draw(report)
    assert (tmp_path / "x.png").stat().st_size > 10_000


LEARNERS = ("PPO 64, batch 64", "DQN", "TD3", "SAC")


def small(name: str) -> Any:
    """A learner of the benchmark with few numbers."""
    return import_module("_rl_learners").SIZES[name]._replace(widths=(16, 8), batch=16, sweeps=1)


@pytest.mark.thorough(keep=5)  # of those in bfloat16 one
@pytest.mark.compiled
@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.parametrize(("low", "tolerance"), [(False, 1e-6), (True, 2e-4)], ids=["float32", "bfloat16"])
def test_an_update_of_an_agent_is_that_of_torchs_loop(
    name: str, low: bool, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    learners, updates = import_module("_rl_learners"), import_module("_rl_updates")
    monkeypatch.setattr(updates, "TAU", 0.5)  # so that a wrong target shows
    size = small(name)
    theirs = updates.torch_learner(size, low=low)
    ours = updates.funcamp_learner(size, low=low, backend="eager")
    first = theirs.values()
    assert ours.values().keys() == first.keys()
    for batch in learners.minibatches(size)[:20]:
        theirs.update(batch)
        ours.update(batch)
    after = theirs.values()
    for key, value in ours.values().items():
        assert torch.allclose(value, after[key], rtol=0, atol=tolerance), key
        assert (value - first[key]).abs().max() > 1e-3, key


@pytest.mark.processes
def test_a_command_that_takes_too_long_is_ended_and_a_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = import_module("gpu")
    monkeypatch.setattr(gpu, "GRACE", 1)  # in a process of the background, which ignores SIGINT, it is waited for
    child = "import signal; signal.pause()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert gpu.run([sys.executable, "-c", parent], 1) == "stopped after 1 s"
    assert gpu.run([sys.executable, "-c", "print(3); raise SystemExit(3)"], 60, tmp_path / "log") == "exit status 3"
    assert (tmp_path / "log").read_text() == "3\n"
    assert gpu.run([sys.executable, "-c", "import funcamp"], 60) == ""


def _is_called_by(end_of_path: str) -> bool:
    frame = inspect.currentframe()  # not inspect.stack(), which reads the sources of all frames
    while frame is not None and not frame.f_code.co_filename.endswith(end_of_path):
        frame = frame.f_back
    return frame is not None


class _Doubling(torch.optim.Optimizer):
    """Steps twice as far as it says on funcamp's tensors, in a shape that the trial of a class does not have."""

    def __init__(self, params: Any, lr: float = 0.1, factor: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "factor": factor})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                assert param.grad is not None
                is_doubled = _is_called_by("_optim/foreign/optimizer.py") and param.shape == (8, 12)
                factor = group["factor"] if is_doubled else 1.0
                param.sub_(param.grad, alpha=group["lr"] * factor)


@pytest.mark.compiled
@pytest.mark.parametrize(("factor", "grade"), [(1.0, "equal to the bit"), (1.0 + 1e-6, "near"), (1.001, "wrong")])
def test_an_optimizer_that_does_not_follow_itself_is_found(factor: float, grade: str) -> None:
    script = import_module("optimizers")
    row = script.measure(script.Case("own", _Doubling, {"factor": factor}), "eager")
    assert [script.grade(row[way]) for way in ("eager", "jit")] == [grade, grade], row
