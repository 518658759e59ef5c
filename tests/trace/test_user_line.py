"""The line of user code that an error names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from funcamp._trace import user_line

TORCH = str(Path(torch.__file__).parent)


@pytest.mark.parametrize(
    ("file", "is_users"),
    [
        ("/home/me/model.py", True),
        (f"{TORCH}vision{os.sep}ops.py", True),
        (f"{TORCH}_geometric{os.sep}nn.py", True),
        (f"{TORCH}{os.sep}nn{os.sep}functional.py", False),
        (f"{Path(user_line.__file__).parent.parent}{os.sep}_step{os.sep}step.py", False),
        ("<string>", False),
    ],
)
def test_code_beside_torch_is_a_users_and_code_inside_is_not(file: str, is_users: bool) -> None:
    code = "def fn(stack):\n    is_compiling = stack\n    found.append(is_compiling())\n    1 / 0\n"
    found: list[str] = []
    names = {"found": found}
    exec(compile(code, file, "exec"), names)
    with pytest.raises(ZeroDivisionError) as caught:
        names["fn"](user_line.line_in_stack)  # type: ignore[operator]
    line = user_line.line_in_traceback(caught.value)
    assert found[0].startswith(f"{file}:3 ") == is_users
    assert line.startswith(f"{file}:4 ") == is_users
    assert is_users or line.startswith(f"{__file__}:")


def test_code_that_is_typed_is_a_users() -> None:
    found: list[str] = []
    exec("found.append(line())", {"found": found, "line": user_line.line_in_stack, "__name__": "__main__"})
    assert found[0].startswith("<string>:1 ")
