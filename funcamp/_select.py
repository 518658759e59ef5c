"""Take an optimizer's step and put back what it changed where a flag says so, without reading the flag.

The optimizer's own `step` runs in place; parameters and state are copied before it and chosen after it, element by
element: new where found_inf is 0, old elsewhere.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: found_inf for every device that holds gradients: float32, shape (), 1.0 or 0.0.
Flags = dict[torch.device, Tensor]

_reads_host: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def read(flags: Flags) -> bool:
    """Whether any flag is set, on the host: waits for the device."""
    return any(bool(flag != 0) for flag in flags.values())


def select(optimizer: torch.optim.Optimizer, flags: Flags, step: Callable[[], Any]) -> Any:
    """Call `step`, which steps the optimizer, and undo it where a flag is set; return what it returned.

    Where the optimizer keeps what no selection can undo (Python numbers, tensors that lie elsewhere than their
    parameter), the flag is read on the host instead, with a warning once an optimizer.

    Raises:
        RuntimeError: the flag would be read while a CUDA graph is being captured.
    """
    made = Made(optimizer)
    params = made.params
    apart = any(
        isinstance(value, Tensor) and value.device != param.device
        for param in params
        for value in optimizer.state.get(param, {}).values()
    )
    if apart or optimizer in _reads_host:
        _warn(optimizer, "tensors on the host" if apart else "Python numbers")
        return None if read(flags) else step()
    numbers = [
        (place, name, value)
        for place in (*made.entries, *optimizer.param_groups, vars(optimizer))
        for name, value in place.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    ]
    changing = [*params, *(value for entry in made.entries for value in entry.values() if isinstance(value, Tensor))]
    with torch.no_grad():
        kept = [torch.empty_like(tensor) for tensor in changing]
        torch._foreach_copy_(kept, changing)
        result = step()
        found = {device: flag != 0 for device, flag in flags.items()}
        for tensor, old in zip(changing, kept):
            if tensor.device not in found:
                found[tensor.device] = next(iter(flags.values())).to(tensor.device, non_blocking=True) != 0
            torch.where(found[tensor.device], old, tensor, out=tensor)
    counted = [(place, name, value) for place, name, value in numbers if place.get(name) != value]
    if counted:
        _warn(optimizer, "Python numbers")
        if read(flags):
            for place, name, value in counted:
                place[name] = value
    made.remove(flags)
    return result


class Made:
    """The state an optimizer has before a step, so that what the step makes can be told from it and removed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        _make_state(optimizer, self.params)
        self._state = optimizer.state
        self.entries = [self._state[param] for param in self.params if param in self._state]
        self._names = [set(entry) for entry in self.entries]

    def remove(self, flags: Flags) -> None:
        """Remove what the step made, if it made anything and a flag is set: only then is the flag read."""
        made: list[tuple[Any, Any]] = [
            (entry, name) for entry, names in zip(self.entries, self._names) for name in entry if name not in names
        ]
        known = {id(entry) for entry in self.entries}
        made += [(self._state, p) for p in self.params if p in self._state and id(self._state[p]) not in known]
        if made and read(flags):
            for place, name in made:
                del place[name]


def _make_state(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> None:
    """Give torch.optim's classes the state that their first step would begin with, so that it can be selected."""
    if all(optimizer.state.get(param) for param in params):
        return
    init_group = getattr(optimizer, "_init_group", None)
    if init_group is None or not init_group.__module__.startswith("torch.optim."):
        return
    lists = len(inspect.signature(init_group).parameters) - 1
    with torch.no_grad():
        for group in optimizer.param_groups:
            init_group(group, *([] for _ in range(lists)))
            if isinstance(optimizer, torch.optim.SGD) and group["momentum"] != 0 and group["dampening"] == 0:
                # its first buffer is the gradient itself, which a later step makes of zeros; the fused kernel, where
                # the first step is skipped, leaves uninitialized memory in it
                for param in group["params"]:
                    if param.grad is not None and optimizer.state[param].get("momentum_buffer") is None:
                        optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


def _warn(optimizer: torch.optim.Optimizer, what: str) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"GradScaler.step: optimizer must keep its state in tensors beside its parameters to be captured; "
            f"{type(optimizer).__name__} keeps {what}: pass capturable=True or fused=True where it has them"
        )
    if optimizer not in _reads_host:
        _reads_host.add(optimizer)
        warnings.warn(
            f"GradScaler.step: {type(optimizer).__name__} keeps {what}, which cannot be put back without reading "
            "found_inf on the host, as torch.amp.GradScaler does; pass it capturable=True or fused=True where it has "
            'them, or skip="host" to GradScaler to say that you know',
            stacklevel=4,
        )
