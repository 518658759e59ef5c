"""What torch's own code and models see while this thread traces: as under torch.compile, and in no other thread."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch


class _ThisThread(threading.local):
    is_compiling: bool | None = None
    """What torch.compiler.is_compiling() returns; None for torch's own answer."""


_this_thread = _ThisThread()


@contextlib.contextmanager
def as_compiled(is_compiling: bool) -> Iterator[None]:
    """Context manager: torch.compiler.is_compiling() is True in this thread if `is_compiling`, else torch's own answer.

    Models ask before they read values.
    """
    _ask_each_thread()
    compiling_before = _this_thread.is_compiling
    _this_thread.is_compiling = True if is_compiling else None
    try:
        yield
    finally:
        _this_thread.is_compiling = compiling_before


@contextlib.contextmanager
def as_eager() -> Iterator[None]:
    """Context manager: torch.compiler.is_compiling() is False in this thread, as it is in eager mode.

    torch.optim's classes choose other formulas if it is True: NAdam's product of momenta is then read in float32.
    """
    compiling_before = _this_thread.is_compiling
    if torch.compiler.is_compiling():
        _ask_each_thread()
        _this_thread.is_compiling = False
    try:
        yield
    finally:
        _this_thread.is_compiling = compiling_before


@functools.cache
def _ask_each_thread() -> None:
    """Make torch.compiler.is_compiling ask this thread too.

    torch has one flag for all threads, and its optimizers choose other formulas if it is set. The code of the function
    is replaced, so that it is the same function to all who imported it, and to Dynamo. It stays replaced: without a
    trace in a thread the answer is torch's.
    """
    function: Any = torch.compiler.is_compiling
    torchs_code = function.__code__
    torchs_function = types.FunctionType(torchs_code, function.__globals__)
    # Callables of C and code that names torch's file: Dynamo compiles no frame of torch's, and would this one.
    answer_in_this_thread = functools.partial(getattr, _this_thread, "is_compiling", None)
    function.__globals__["_funcamp_answers_in_this_thread"] = answer_in_this_thread
    function.__globals__["_is_compiling_as_torch_says"] = torchs_function
    # TorchScript takes the source from the file and the line that the code names.
    function.__code__ = _is_compiling.__code__.replace(
        co_filename=torchs_code.co_filename, co_name=torchs_code.co_name, co_firstlineno=torchs_code.co_firstlineno
    )


def _is_compiling() -> bool:
    """Give torch.compiler.is_compiling its code; the names that are not defined here are in that function's globals."""
    answer = _funcamp_answers_in_this_thread()  # type: ignore[name-defined]  # noqa: F821
    return _is_compiling_as_torch_says() if answer is None else answer  # type: ignore[name-defined,no-any-return]  # noqa: F821
