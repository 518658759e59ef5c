"""An eager backward pass that calls modules again, as `torch.utils.checkpoint` does: with the forward's parameters.

`functional_call` puts a module's own parameters back before the backward pass begins. What is computed again meets
those, and the gradients are wrong without a word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


@contextlib.contextmanager
def same_parameters() -> Iterator[Callable[[], None]]:
    """A region that sees the modules called in it; what it yields is to be called between forward and backward.

    Raises:
        RuntimeError: a module is called again, afterwards, with other parameters than it had before, or it had several.
    """
    if torch.compiler.is_dynamo_compiling():
        yield lambda: None
        return
    tape: Any = torch._C._autograd
    if not torch._C._are_functorch_transforms_active():
        tape._saved_tensors_hooks_enable()  # a failed compilation of torch.func may have left them off
    seen: dict[nn.Module, set[tuple[int, ...]]] = {}
    backward = False

    def begin() -> None:
        nonlocal backward
        backward = True

    def look(module: nn.Module, _: Any) -> None:
        held = tuple(id(value) for value in module._parameters.values())
        if not backward:
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
