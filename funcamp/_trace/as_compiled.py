"""What torch.compiler.is_compiling() returns while a step is traced: models ask before they read values.

torch has one flag for all threads, and torch.compile sets it for all of them while it compiles.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from unittest import mock

import torch

from funcamp._trace.tracing import current


def as_compiled(is_compiling: bool) -> AbstractContextManager[object]:
    """Context manager: torch.compiler.is_compiling() returns this."""
    return mock.patch.object(torch.compiler, "_is_compiling_flag", is_compiling)


def as_eager() -> AbstractContextManager[object]:
    """Context manager: torch.compiler.is_compiling() is False in a trace, too.

    torch.optim's classes choose other formulas if it is True: NAdam's product of momenta is then read in float32.
    """
    return contextlib.nullcontext() if current.recorder is None else as_compiled(False)
