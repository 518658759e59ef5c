"""Independence of the caller's modes and defaults."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from funcamp import _upstream
from funcamp._trace.host_generators import host_generators, set_states, states_of


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Context manager: new tensors are on the CPU and have values, whatever the caller's modes and defaults are."""
    # A region of `torch.device` costs some time in every call of torch.
    on_cpu = contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    disabled = _upstream.find("torch.utils._python_dispatch._disable_current_modes", contextlib.nullcontext)
    with on_cpu, disabled(), torch.inference_mode(mode=False):
        yield


@contextlib.contextmanager
def generators_put_back() -> Iterator[None]:
    """Context manager: afterwards the global generators of Python, numpy and, on the CPU, of torch are as before."""
    generators = host_generators()
    states = states_of(generators)
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            set_states(generators, states)
