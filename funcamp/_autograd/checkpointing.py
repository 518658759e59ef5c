"""A check that an eager backward pass which calls modules again uses the forward pass's parameters.

`torch.utils.checkpoint` calls modules again. `functional_call` restores a module's own parameters before the backward
pass begins, so recomputation would use those, and the gradients would be silently wrong. A loss of `module_loss`
has its parameters in the module until the backward pass has ended, and needs no check.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


@contextlib.contextmanager
def same_parameters(*, has_module: bool) -> Iterator[Callable[[], None]]:
    """Context manager: check the parameters of modules that are called again, unless a module has its own till then.

    Call the yielded function between forward and backward pass.
    Only a global module hook sees every call. Dynamo traces that hook, and other threads call it: it does nothing under
    Dynamo, and ignores modules that other threads call in the forward pass.

    Raises:
        RuntimeError: a module is called again with other parameters than before, or was called with several sets.
    """
    if has_module or torch.compiler.is_dynamo_compiling():
        yield lambda: None
        return
    own_thread = threading.get_ident()
    # The ids of the parameters with which each module was called in the forward pass.
    ids_in_forward: dict[nn.Module, set[tuple[int, ...]]] = {}
    is_backward = False

    def begin_backward() -> None:
        nonlocal is_backward
        is_backward = True

    def check_parameters(module: nn.Module, _: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        parameter_ids = tuple(id(value) for value in module._parameters.values())
        if not is_backward:
            if threading.get_ident() == own_thread:
                ids_in_forward.setdefault(module, set()).add(parameter_ids)
            return
        # Of two sets it is unknown which one is right. A module that was not called before has none to compare with.
        expected = ids_in_forward.get(module, {parameter_ids})
        if expected != {parameter_ids}:
            raise RuntimeError(
                f"step: a {type(module).__name__} must be computed again with the parameters of the forward pass, and "
                "have had one set of them there; functional_call has put its own back: checkpoint functional_call "
                "itself, checkpoint(functional_call, module, params, x, use_reentrant=False), or use module_loss"
            )

    handle = register_module_forward_pre_hook(check_parameters)
    try:
        yield begin_backward
    finally:
        handle.remove()
