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
    disabled = _upstream.find("torch.utils._python_dispatch._disable_current_modes", contextlib.nullcontext)
    with _without_function_modes(), disabled(), torch.inference_mode(mode=False):
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


@contextlib.contextmanager
def _without_function_modes() -> Iterator[None]:
    """Context manager: no default device and no region of `torch.device`, which are modes.

    Not `torch.device("cpu")`: in its region `torch.as_tensor(x)` copies a tensor of another device.
    """
    modes_of = _upstream.find("torch.overrides._get_current_function_mode_stack")
    without_last_mode = _upstream.find("torch.overrides._pop_mode_temporarily")
    with contextlib.ExitStack() as stack:
        if _upstream.usable(modes_of, without_last_mode):
            for _ in modes_of():
                stack.enter_context(without_last_mode())
        else:
            stack.enter_context(torch.device("cpu"))
        yield
