"""What torch's own code and models see while this thread traces: as under torch.compile, and in no other thread."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributions import Distribution


class _ThisThread(threading.local):
    is_compiling: bool | None = None
    """What torch.compiler.is_compiling() returns; None for torch's own answer."""
    checks_distributions = True
    """Whether distributions check their values."""


_this_thread = _ThisThread()


@contextlib.contextmanager
def as_compiled(is_compiling: bool) -> Iterator[None]:
    """Context manager: distributions of this thread check no values, which would be reads on the host.

    Args:
        is_compiling: whether torch.compiler.is_compiling() is True in this thread; models ask before they read values.
    """
    _ask_each_thread()
    compiling_before = _this_thread.is_compiling
    checks_before = _this_thread.checks_distributions
    _this_thread.is_compiling = True if is_compiling else None
    _this_thread.checks_distributions = False
    try:
        with _checks_of_each_thread():
            yield
    finally:
        _this_thread.is_compiling = compiling_before
        _this_thread.checks_distributions = checks_before


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


class _Checks:
    """Replaces `Distribution._validate_args`: False for a thread that traces, and what it was for others.

    Args:
        otherwise: what it was.
    """

    def __init__(self, otherwise: bool) -> None:
        self.otherwise = otherwise

    def __get__(self, _: object, __: type) -> bool:
        return self.otherwise and _this_thread.checks_distributions


@contextlib.contextmanager
def _checks_of_each_thread() -> Iterator[None]:
    """Context manager: whether distributions check their values is decided per thread, and not for the class."""
    owner: Any = Distribution
    checks_before = vars(owner)["_validate_args"]
    if not checks_before:  # torch.compile, used before, leaves the checks off
        yield
        return
    checks = _Checks(checks_before)
    owner._validate_args = checks
    try:
        yield
    finally:
        if vars(owner)["_validate_args"] is checks:  # else somebody has set it since
            owner._validate_args = checks_before
