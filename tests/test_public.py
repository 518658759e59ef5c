"""The public surface: documented, typed, and shown in a README whose code runs."""

from __future__ import annotations

import ast
import inspect
import operator
import re
from pathlib import Path

import pytest

import funcamp
from funcamp import _upstream, distributed, numerics

ROOT = Path(__file__).parent.parent
LAYERS = [
    {"_upstream"},
    {"_types", "_mesh", "_user_line"},
    {"_memory", "_ranks"},
    {"_ties"},
    {"_advice", "_tree", "_constants", "_recompute", "_whole", "_formats"},
    {"_schema"},
    {"_draws", "_kept", "_decomposed"},
    {"_trace"},
    {"_counts"},
    {"_joint_counts", "_stats"},
    {"_records"},
    {"_tap"},
    {"_presets"},
    {"_config", "_state", "_checkpoint"},
    {"_rules"},
    {"_peer_rules"},
    {"_rulebook"},
    {"_layout", "_policy", "_module", "_branchless"},
    {"_flat", "_track"},
    {"_shards"},
    {"_spread"},
    {
        "_scaler",
        "_update",
        "_limits",
        "_exchange",
        "_clip",
        "_ema",
        "_hyper",
        "_optim_run",
        "_adafactor",
        "_custom_function",
    },
    {"_by_leaf", "_grad", "_fold", "_copies", "_window", "_optim_probe"},
    {"_optim"},
    {"_groups"},
    {"_select_compiled", "_select", "_foreach"},
    {"_held_scaler", "_options", "_train_state"},
    {"_grad_scaler", "_torch_checkpoint"},
    {"_step"},
    {"_make_step"},
    {"_ahead", "_mended", "_metrics", "_progress", "_scratch", "_signature", "_writeback"},
    {"_owned"},
    {"_compile"},
    {"_capture", "_unroll"},
    {"_jit_step"},
    {"_jit"},
    {"_passes"},
    {"_doctor", "_recorder", "_report_text"},
    {"_report_page", "_report_plot"},
    {"_report"},
    {"_report_command"},
    {"__main__"},
]


PUBLIC = [*funcamp.__all__]
PUBLIC += [f"{module.__name__[8:]}.{name}" for module in (numerics, distributed) for name in module.__all__]


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


def test_modules_import_only_from_the_layers_above() -> None:
    seen: set[str] = set()
    for layer in LAYERS:
        for module in layer:
            tree = ast.parse((ROOT / "funcamp" / f"{module}.py").read_text())
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("funcamp"):
                    parts = (node.module or "").split(".")
                    used = {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
                    assert used <= seen, f"{module} imports {used - seen}, which is not above it"
        seen |= layer
    files = {path.stem for path in (ROOT / "funcamp").glob("_*.py")} - {"__init__"}
    assert files == seen


def test_only_tree_touches_the_private_pytree_module() -> None:
    users = [path.name for path in (ROOT / "funcamp").rglob("*.py") if re.search(r"import _pytree", path.read_text())]
    assert users == ["_tree.py"]


@pytest.mark.inductor
def test_readme_code_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


def test_readme_names_every_public_name_and_its_files_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    names = [*funcamp.__all__, *numerics.__all__, *distributed.__all__]
    missing = [n for n in names if not re.search(rf"(`|numerics\.|distributed\.){n}\b", readme)]
    assert not missing
    for target in re.findall(r"\]\((?!https?://|#)([^)]+)\)", readme):
        assert (ROOT / target.split("#")[0]).exists(), target


def test_torch_is_a_supported_version() -> None:
    assert _upstream.VERSION >= (2, 11)
