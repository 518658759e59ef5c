"""Break lines of a file of the package, one at a time, and print which breaks the tests notice.

    python tests/mutations.py funcamp/_jit/donation.py tests/jit/test_donation.py --breaks 10

Each break is made in a temporary copy of the repository, in which the given tests run until the first one fails. A
break is also noticed if the tests do not end in time. The same seed breaks the same lines as long as the file stays as
it is, so that the figures before and after a change of the tests can be compared. A break that no test notices is not
always a gap: some change nothing that a user sees, such as the size of a cache.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
COPIED = ("funcamp", "tests", "examples", "benchmarks", "conftest.py", "pyproject.toml")
SELECT = "not inductor and not rest and not cuda and not peers and not models"
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


class Break(NamedTuple):
    """A piece of a file, and what is put in its place."""

    node: Any
    text: str


def breaks_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in place of a node."""
    changed: Any = copy.deepcopy(node)
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        return  # their conditions are nodes, too
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        changed.ops = [SWAPPED[type(node.ops[0])]()]
        yield changed
    elif isinstance(node, ast.BoolOp):
        changed.op = SWAPPED[type(node.op)]()
        yield changed
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield changed.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)):
        changed.value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield changed
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()


def all_breaks(source: str) -> list[Break]:
    """List every break of a file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        found += [Break(node, ast.unparse(ast.fix_missing_locations(new))) for new in breaks_of(node)]
        if isinstance(node, (ast.If, ast.While, ast.IfExp)) and not isinstance(node.test, (ast.Compare, ast.BoolOp)):
            found.append(Break(node.test, f"not ({ast.unparse(node.test)})"))
    return sorted(found, key=lambda one: (one.node.lineno, one.node.col_offset, one.text))


def broken(source: str, change: Break) -> str:
    """Return the source with one break in it."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    node = change.node
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    text = change.text if isinstance(node, ast.stmt) else f"({change.text})"
    changed: bytes = before + text.encode() + after
    return changed.decode()


def outcome(folder: Path, tests: list[str], limit: float) -> str:
    """Run the tests in a copy; return "passed", "failed" or "no end"."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", SELECT, *tests]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return "no end"
    return "passed" if run.returncode == 0 else "failed"


def main() -> None:
    """Break a file as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", help="the file to break, from the root of the repository")
    parser.add_argument("tests", nargs="+", help="the test files to run")
    parser.add_argument("--breaks", type=int, default=10, help="how many lines to break")
    parser.add_argument("--seed", type=int, default=0, help="another seed breaks other lines")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for the tests of one break")
    options = parser.parse_args()
    source = (ROOT / options.file).read_text()
    found = all_breaks(source)
    chosen = random.Random(options.seed).sample(found, min(options.breaks, len(found)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in COPIED:
            copy_part = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy_part(ROOT / part, folder / part)
        if outcome(folder, options.tests, options.limit) != "passed":
            sys.exit("mutations: the tests must pass, within the limit, before anything is broken")
        noticed = 0
        for change in sorted(chosen, key=lambda one: one.node.lineno):
            (folder / options.file).write_text(broken(source, change))
            found_out = outcome(folder, options.tests, options.limit)
            noticed += found_out != "passed"
            line = source.splitlines()[change.node.lineno - 1].strip()
            sign = "not noticed" if found_out == "passed" else f"noticed ({found_out})"
            print(f"{sign:18} {options.file}:{change.node.lineno}  {line}  ->  {change.text}", flush=True)
    print(f"{noticed} of {len(chosen)} noticed")


if __name__ == "__main__":
    main()
