"""An eager backward pass that calls modules again, as `torch.utils.checkpoint` does: with the forward's parameters.

`functional_call` puts a module's own parameters back before the backward pass begins. What is computed again meets
those, and the gradients are wrong without a word. A loss of `module_loss` holds them itself and needs no watch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


@contextlib.contextmanager
def same_parameters() -> Iterator[Callable[[], None]]:
    """A region that sees the modules this thread calls; what it yields is to be called between forward and backward.

    The one way to see a call of any module is a hook on all of them, which Dynamo traces and other threads call too:
    to the one it does nothing, and of the others it learns no module.

    Raises:
        RuntimeError: a module is called again, afterwards, with other parameters than it had before, or it had several.
    """
    if torch.compiler.is_dynamo_compiling():
        yield lambda: None
        return
    thread = threading.get_ident()
    seen: dict[nn.Module, set[tuple[int, ...]]] = {}
    backward = False

    def begin() -> None:
        nonlocal backward
        backward = True

    def look(module: nn.Module, _: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        held = tuple(id(value) for value in module._parameters.values())
        if not backward:
            if threading.get_ident() == thread:
                seen.setdefault(module, set()).add(held)
        elif seen.get(module, {held}) != {held}:  # with two sets before, which was it?
            raise RuntimeError(
                f"step: a {type(module).__name__} must be computed again with the parameters of the forward pass, and "
                "have had one set of them there; functional_call has put its own back: checkpoint functional_call "
                "itself, checkpoint(functional_call, module, params, x, use_reentrant=False), or use module_loss"
            )

    handle = register_module_forward_pre_hook(look)
    try:
        yield begin
    finally:
        handle.remove()


def allow_hooks() -> None:
    """Let saved-tensor hooks be used: a failed compilation of torch.func may have left them off."""
    tape: Any = torch._C._autograd
    if not torch.compiler.is_dynamo_compiling() and not torch._C._are_functorch_transforms_active():
        tape._saved_tensors_hooks_enable()
