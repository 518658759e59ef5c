"""The files around the code: versions, Pythons and pins that are written in several places agree."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import funcamp
from tests.support.tokens import tokens_by_room

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = dict(re.findall(r"^([\w-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
PYTHONS = [
    text.rsplit(" ", 1)[1] for text in PROJECT["project"]["classifiers"] if re.search(r"Python :: 3\.\d+$", text)
]


#: How a test shows something: it asserts, or what it calls is named so that a reader sees that it does.
SHOWS = re.compile("assert|raises|warns|deprecated_call|fail")


def in_yaml(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def matrix() -> list[dict[str, str]]:
    found: list[dict[str, str]] = in_yaml(".github/workflows/test.yml")["jobs"]["test"]["strategy"]["matrix"]["include"]
    return found


def test_newest_version_in_the_changelog_and_the_citation_is_the_packages() -> None:
    versions = re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == funcamp.__version__
    assert in_yaml("CITATION.cff")["version"] == funcamp.__version__


def test_date_of_the_version_is_one() -> None:
    dated = re.search(r"^## \d\S* - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert dated is not None
    assert str(in_yaml("CITATION.cff")["date-released"]) == dated[1]


def test_classifiers_are_the_pythons_that_pip_accepts() -> None:
    accepted = SpecifierSet(PROJECT["project"]["requires-python"])
    assert [f"3.{minor}" for minor in range(30) if f"3.{minor}" in accepted] == PYTHONS
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{PYTHONS[0].replace('.', '')}"


def test_workflow_runs_every_python_and_the_oldest_torch() -> None:
    assert [pair["python"] for pair in matrix()] == PYTHONS
    torches = [pair["torch"] for pair in matrix()]
    (required,) = (text for text in PROJECT["project"]["dependencies"] if text.startswith("torch"))
    assert required == f"torch>={torches[0].rsplit('.', 1)[0]}"
    assert PINS["torch"] in torches


def test_readme_names_the_torches_of_the_workflow_and_the_newest_is_in_the_makefile() -> None:
    torches = sorted({pair["torch"] for pair in matrix()}, key=Version)
    *some, last = [torch.rpartition(".")[0] for torch in torches]
    assert f"with torch {', '.join(some)} and {last}" in (ROOT / "README.md").read_text()
    assert f"\nNEWEST := {torches[-1]}\n" in (ROOT / "Makefile").read_text()


def test_workflows_call_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for file in (ROOT / ".github" / "workflows").iterdir():
        for target in re.findall(r"run: make (\w+)", file.read_text()):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{file.name}: make {target}"


def shows_something(test: ast.FunctionDef) -> bool:
    """Whether a test asserts, expects an error or a warning, or uses a helper that is named so."""
    for node in ast.walk(test):
        name = getattr(node, "id", getattr(node, "attr", ""))
        if isinstance(node, ast.Assert) or SHOWS.match(name):
            return True
    return False


def test_every_test_asserts_or_calls_what_is_named_so() -> None:
    silent = []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not shows_something(node):
                silent.append(f"{file.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert silent == []


def test_pre_commit_has_the_pinned_ruff() -> None:
    (repo,) = in_yaml(".pre-commit-config.yaml")["repos"]
    assert repo["rev"] == f"v{PINS['ruff']}"


def test_contributing_explains_every_marker() -> None:
    names = [marker.split(":")[0] for marker in PROJECT["tool"]["pytest"]["ini_options"]["markers"]]
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert [name for name in names if f"| `{name}` |" not in text] == []


def test_changelog_of_the_release_is_short() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    release = [number for number, line in enumerate(lines) if line.startswith("## 0.1.0")]
    assert len(lines) - release[0] <= 80


#: The tokens of code that a room may have. A figure may only be lowered, or raised in a commit that names the users who
#: need it, and why nothing simpler serves them.
MOST_TOKENS: dict[str, int] = {
    "_jit": 21_900,
    "report": 25_500,
    "_optim": 21_300,
    "_trace": 15_000,
    "_autograd": 9_600,
    "_step": 10_100,
    "_cpu": 7_000,
    "numerics": 6_100,
    "_verify": 4_800,
    "_upstream": 4_300,
    "_amp": 5_700,
    "files beside": 5_000,
    "_storage": 3_600,
    "_scaler": 4_800,
    "rules": 3_500,
    "_step_file": 3_000,
    "distributed": 3_700,
    "float8": 2_400,
    "command line": 1_000,
    "_io": 1_100,
}


def test_no_room_grows() -> None:
    counts = tokens_by_room(ROOT / "funcamp")
    assert counts.keys() == MOST_TOKENS.keys()
    for name, count in counts.items():
        most = MOST_TOKENS[name]
        assert count <= most, (
            f"{name} has {count} tokens of code, at most {most}: remove something, or raise MOST_TOKENS in a commit "
            "that names the users who need it"
        )


def test_room_that_shrinks_lowers_its_figure() -> None:
    counts = tokens_by_room(ROOT / "funcamp")
    smaller = {name: counts[name] for name, most in MOST_TOKENS.items() if counts[name] < 0.95 * most}
    assert not smaller, f"lower these figures of MOST_TOKENS: {smaller}"
