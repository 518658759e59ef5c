"""Independence of the caller's modes and defaults."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from funcamp import _upstream


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Context manager: new tensors are on the CPU and have values, whatever the caller's modes and defaults are."""
    # A region of `torch.device` costs some time in every call of torch.
    on_cpu = contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    disabled = _upstream.find("torch.utils._python_dispatch._disable_current_modes", contextlib.nullcontext)
    with on_cpu, disabled(), torch.inference_mode(mode=False):
        yield
