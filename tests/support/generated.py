"""What torch.compile generated: its code, and how many kernels one call launches."""

from __future__ import annotations

import re
from collections.abc import Callable
from unittest import mock

import torch
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import run_and_get_code


def generated(fn: Callable[..., object], *args: object) -> str:
    """The code of the one graph that Inductor makes of a function; the function is called once."""
    return code_of(torch.compile(fn, fullgraph=True), *args)


class _Written(BaseException):
    """No Exception, which torch.compile would wrap."""


def written(compiled: Callable[..., object], *args: object) -> str:
    """The code of the first graph that a first call generates; it is not compiled, and nothing runs."""
    code = ""

    def stop(text: str) -> None:
        nonlocal code
        code = text
        raise _Written

    torch._dynamo.reset()
    with mock.patch.object(GraphLowering, "save_output_code", stop):
        try:
            compiled(*args)
        except _Written:
            return code
    raise AssertionError("no graph was compiled")


def code_of(compiled: Callable[..., object], *args: object) -> str:
    """The code of the one graph that a first call compiles."""
    _, codes = run_and_get_code(compiled, *args)
    assert len(codes) == 1, f"{len(codes)} graphs instead of one"
    code: str = codes[0]
    return code


def launches(code: str) -> int:
    """Generated kernels that one call runs; matrix products of a library do not count."""
    body = code[code.index("def call(") :]
    return len(re.findall(r"^\s+(?:cpp_\w+\(|\w+\.run\()", body, re.M))
