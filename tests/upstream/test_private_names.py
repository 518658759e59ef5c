"""A private name that torch no longer has: a warning, a line of the doctor's, errors where needed, no wrong number."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import funcamp
from funcamp import _upstream
from tests.support.launch import ENVIRONMENT, ROOT

pytestmark = pytest.mark.processes

FOLDER = Path(funcamp.__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))


def dotted(node: ast.expr) -> str:
    """torch._C.x for that expression."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes outside of `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING":
            for other in node.orelse:
                yield other
                yield from at_run_time(other)
        else:
            yield node
            yield from at_run_time(node)


def is_private(name: str) -> bool:
    first, *others = name.split(".")
    return first == "torch" and any(part.startswith("_") and not part.endswith("__") for part in others)


def used_in(file: Path) -> set[str]:
    """Private names of torch that a file uses without `_upstream.find`."""
    found: set[str] = set()
    for node in at_run_time(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(dotted(node))
    return {name for name in found if is_private(name)}


def asked_for(file: Path) -> set[str]:
    """The names that a file gives to `find`."""
    return {
        str(node.args[0].value)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and dotted(node.func).split(".")[-1] == "find"
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and is_private(str(node.args[0].value))
    }


def test_the_list_of_private_names_is_what_the_library_asks_for() -> None:
    assert set.union(*map(asked_for, FILES)) == set(_upstream.PRIVATE)


#: Files that use private names without `find`: workarounds of versions that have the name, and the compiler's parts.
#: The report has names of its own, in `report/torch_names.py`, which raise when it is imported.
DIRECT = {
    "_autograd/differentiate.py",
    "distributed/collectives.py",
    "_cpu/headers.py",
    "_jit/compile.py",
    "_jit/passes/table.py",
    "_jit/passes/zero_tensors.py",
    "_optim/pure_calls.py",
    "_upstream/autograd_function.py",
    "_upstream/bugs.py",
}


def test_no_other_file_uses_a_private_name_without_find() -> None:
    users = {file.relative_to(FOLDER).as_posix(): names for file in FILES if (names := used_in(file))}
    assert {file: names for file, names in users.items() if file not in DIRECT} == {}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each name's process wrote; "" stands for no name."""
    folder = tmp_path_factory.mktemp("hidden")
    names = ["", *_upstream.PRIVATE]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.upstream.hiding", str(folder)],
        cwd=ROOT, env={**ENVIRONMENT, "PYTHONWARNINGS": ""}, input=json.dumps(names), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    missing = [name for name in names if not (folder / f"{name}.json").exists()]
    assert not missing, done.stderr[-8000:]
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


@pytest.mark.thorough
@pytest.mark.inductor
def test_every_part_works_with_every_name(found: dict[str, Any]) -> None:
    assert found[""].pop("warnings") == []
    assert found[""].pop("doctor") == []
    assert [text for text in found[""].values() if not isinstance(text, str) or text.startswith("RuntimeError")] == []


@pytest.mark.thorough
@pytest.mark.inductor
@pytest.mark.parametrize("name", _upstream.PRIVATE)
def test_without_a_name_the_library_warns_once_and_is_right_or_says_so(name: str, found: dict[str, Any]) -> None:
    without = dict(found[name])
    (message,) = without.pop("warnings")
    assert f"has no {name}, so {_upstream.PRIVATE[name]}" in message
    assert without.pop("doctor") == [message]
    for part, result in without.items():
        assert result == found[""].get(part) or f"has no {name}, so" in result, (part, result)
