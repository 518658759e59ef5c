"""Independence of the caller's modes and defaults."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from funcamp import _upstream


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Context manager: new tensors are on the CPU and have values, whatever the caller's modes and defaults are."""
    disabled = _upstream.find("torch.utils._python_dispatch._disable_current_modes", contextlib.nullcontext)
    with _without_function_modes(), disabled(), torch.inference_mode(mode=False):
        yield


def states_of_generators() -> tuple[object, ...]:
    """Return the states of the global generators of Python and numpy, which can be compared."""
    numpy_random: Any = sys.modules.get("numpy.random")
    state_of_numpy = () if numpy_random is None else numpy_random.get_state()
    return random.getstate(), *[item.tobytes() if hasattr(item, "tobytes") else item for item in state_of_numpy]


@contextlib.contextmanager
def generators_put_back() -> Iterator[None]:
    """Context manager: afterwards the global generators of Python, numpy and, on the CPU, of torch are as before."""
    numpy_random: Any = sys.modules.get("numpy.random")
    state, state_of_numpy = random.getstate(), None if numpy_random is None else numpy_random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(state)
            if numpy_random is not None:
                numpy_random.set_state(state_of_numpy)


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
