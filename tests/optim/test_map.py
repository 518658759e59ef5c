"""The map of `funcamp._optim`, its docstring, has every file, and names functions and words of errors that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import funcamp._optim

ROOM = Path(funcamp._optim.__file__).parent
MAP = funcamp._optim.__doc__ or ""


def definitions(file: Path) -> set[str]:
    """The names of the functions, classes and methods of a file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
    return names


def texts(file: Path) -> list[str]:
    """The literal parts of the strings of a file."""
    constants = [node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
    return [value for value in constants if isinstance(value, str)]


def test_every_file_is_on_the_map() -> None:
    files = {file.name for file in ROOM.glob("*.py")}
    assert files - set(re.findall(r"\w+\.py", MAP)) == {"__init__.py"}


def test_every_function_on_the_map_exists() -> None:
    for module, name in re.findall(r"\b(\w+)\.(\w+(?:\.\w+)?)", MAP):
        if name != "py" and module != "torch":
            assert name in definitions(ROOM / f"{module}.py"), f"{module}.{name}"


def test_the_words_of_every_refusal_on_the_map_are_in_its_file() -> None:
    table = MAP.partition("Where a class or an argument is refused")[2]
    file = ""
    for line in table.splitlines():
        if row := re.match(r"    (\w+\.py)", line):
            file = row[1]
        for words in re.findall('"([^"]+)"', line):
            assert any(words in text for text in texts(ROOM / file)), f"{file}: {words}"
