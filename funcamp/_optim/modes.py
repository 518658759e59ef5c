"""Independence of the caller's modes and defaults."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from funcamp import _upstream


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Context manager: new tensors are on the CPU and have values, whatever the caller's modes and defaults are."""
    disabled = _upstream.find("torch.utils._python_dispatch._disable_current_modes", contextlib.nullcontext)
    # In a region of torch.device("cpu"), torch.as_tensor(x) copies a tensor of another device there: only where needed.
    is_on_cpu = torch.get_default_device().type == "cpu"
    on_cpu = contextlib.nullcontext() if is_on_cpu else torch.device("cpu")
    with disabled(), on_cpu, torch.inference_mode(mode=False):
        yield
