"""The public surface: documented, typed, and shown in a README whose code runs."""

from __future__ import annotations

import ast
import inspect
import operator
import subprocess
import sys
from pathlib import Path

import pytest

import funcamp
from funcamp import _upstream
from tests.support.public import PUBLIC, assert_python_runs, python_blocks

ROOT = Path(__file__).parent.parent
#: The core: each imports from those before it only: packages, and files at the top.
CORE = [
    "_types",
    "_layers",
    "_upstream",
    "_tree",
    "_check",
    "_dtensor",
    "_memory",
    "_trace",
    "_storage",
    "_scaler",
    "_amp",
    "_io",
    "_optim",
    "_autograd",
    "_step",
    "_jit",
]
#: What the core never imports, in the same order. It finds a layer when an argument names it, in `_layers.py` only.
LAYERS = [
    "_cpu",
    "rules",
    "presets",
    "distributed",
    "float8",
    "numerics",
    "report",
    "_verify",
    "_step_file",
    "_doctor",
]
ROOMS = [*CORE, *LAYERS, "__main__", "__init__"]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_documented(name: str) -> None:
    value = operator.attrgetter(name)(funcamp)
    doc = inspect.getdoc(value) or ""
    assert len(doc) > 40
    if inspect.isfunction(value):
        for section in ("Raises:", "Example:", ">>>"):
            assert section in doc, f"{name} has no {section}"
        for parameter in inspect.signature(value).parameters:
            assert f"{parameter}:" in doc, f"{name} does not describe {parameter}"
        assert "ync" in doc or name in ("stateless", "scaled_grad_and_value"), (
            f"{name} does not say whether it can sync"
        )


def imported(file: Path) -> set[str]:
    """The rooms that a file imports from."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "funcamp":
            room = node.module.split(".")[1:2]
            found |= set(room) if room else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):  # import funcamp.rules.jmp
            paths = [alias.name.split(".") for alias in node.names]
            found |= {path[1] for path in paths if path[0] == "funcamp" and len(path) > 1}
    return found


def test_a_room_imports_only_from_those_before_it() -> None:
    files: dict[str, list[Path]] = {}
    for file in (ROOT / "funcamp").rglob("*.py"):
        files.setdefault(file.relative_to(ROOT / "funcamp").parts[0].removesuffix(".py"), []).append(file)
    assert sorted(files) == sorted(ROOMS)
    for number, room in enumerate(ROOMS):
        for file in files[room]:
            later = imported(file) & set(ROOMS[number + 1 :])
            assert not later, f"{file.relative_to(ROOT)} imports from {', '.join(sorted(later))}"


#: The files of the core that ask `_layers`: for `loss(probes=)`, for passes, and for `run.save`.
ASKING = {"_autograd/loss.py", "_jit/passes/__init__.py", "_jit/jit_step.py"}


def test_the_core_finds_layers_in_one_place() -> None:
    files = [file for room in CORE for file in (ROOT / "funcamp" / room).rglob("*.py")]
    files += [file for room in CORE if (file := ROOT / "funcamp" / f"{room}.py").exists()]
    by_name = {file.relative_to(ROOT / "funcamp").as_posix(): file for file in files}
    assert {name for name, file in by_name.items() if "_layers" in imported(file)} == ASKING
    for name, file in by_name.items():
        if name != "_layers.py":
            assert 'import_module(f"funcamp' not in file.read_text(), name


@pytest.mark.processes
def test_a_step_runs_without_any_layer_and_the_drop_in_with_few_files() -> None:
    """The core by itself: `funcamp/__init__.py`, which imports the layers that have public names, is left out."""
    code = """
        import sys, types
        package = types.ModuleType("funcamp")
        package.__path__ = ["funcamp"]
        sys.modules["funcamp"] = package
        import torch
        from funcamp._amp.grad_scaler import GradScaler
        of_the_drop_in = [name for name in sys.modules if name.startswith("funcamp.")]
        from funcamp._autograd.module_loss import module_loss
        from funcamp._jit.jit import jit
        from funcamp._optim.stateless import stateless
        from funcamp._step.make import make_train_step
        torch.manual_seed(0)  # no overflow at the first scale
        loss_fn = module_loss(torch.nn.Linear(4, 2), torch.nn.functional.mse_loss)
        step = make_train_step(loss_fn, stateless(torch.optim.SGD, lr=0.1), policy="float16", accumulate=2)
        batch = torch.ones(2, 3, 4), torch.ones(2, 3, 2)
        state, metrics = step(step.init(), batch)
        state, metrics = jit(step, backend="eager")(state, batch)
        rooms = {name.split(".")[1] for name in sys.modules if name.startswith("funcamp.")}
        print(int(metrics.applied), len(of_the_drop_in), *rooms)
    """
    ran = subprocess.run(
        [sys.executable, "-c", inspect.cleandoc(code)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    applied, files_of_the_drop_in, *rooms = ran.stdout.split()
    assert applied == "2"
    assert set(rooms) <= set(CORE)
    assert int(files_of_the_drop_in) <= 25  # who uses only GradScaler reads and loads no more


def test_jit_knows_pytrees_and_no_training_state_and_the_report_no_core() -> None:
    of_training = {"_scaler", "_io", "_storage", "_optim", "_amp", "_step", *LAYERS}
    for room in ("_jit", "_trace"):
        for file in (ROOT / "funcamp" / room).rglob("*.py"):
            assert not imported(file) & of_training, file.relative_to(ROOT)
    # The report knows torch and the counts of `numerics`, and nothing of the core.
    for file in (ROOT / "funcamp" / "report").rglob("*.py"):
        assert imported(file) <= {"report", "numerics"}, file.relative_to(ROOT)


@pytest.mark.inductor
def test_readme_code_runs() -> None:
    assert python_blocks(ROOT / "README.md")
    assert_python_runs(ROOT / "README.md")


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 170


@pytest.mark.compiled
def test_importing_funcamp_does_not_import_the_compiler() -> None:
    found = (
        "import sys, funcamp; print([m for m in ('torch._dynamo', 'torch._inductor', 'sympy') if m in sys.modules]);"
        "print(funcamp.numerics.__name__, funcamp.distributed.__name__, hasattr(funcamp, 'other'))"
    )
    ran = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout.splitlines() == ["[]", "funcamp.numerics funcamp.distributed False"]


def test_torch_is_a_supported_version() -> None:
    assert _upstream.VERSION >= (2, 11)
