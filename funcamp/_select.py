"""Take an optimizer's step and put back what it changed where a flag says so, without reading the flag.

The optimizer's own `step` runs in place; parameters and state are copied before it and chosen after it, element by
element: new where found_inf is 0, old elsewhere. That is right only where everything a step writes is known, so it is
done for torch.optim's own classes, as they are.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as _optimizer

#: found_inf for every device that holds gradients: float32, shape (), 1.0 or 0.0.
Flags = dict[torch.device, Tensor]

#: What a step of these writes: parameters, and tensors in the state of a parameter.
_KNOWN = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.RMSprop, torch.optim.ASGD,
    torch.optim.Rprop, torch.optim.Muon,
)  # fmt: skip

_warned: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def read(flags: Flags) -> bool:
    """Whether any flag is set, on the host: waits for the device."""
    return any(bool(flag != 0) for flag in flags.values())


def obstacle(optimizer: Any) -> str | None:
    """Why a step that ran where found_inf is set cannot be undone; None where it can."""
    if type(optimizer) in _KNOWN:
        return None
    name = type(optimizer).__name__
    if type(optimizer) in (torch.optim.SparseAdam, torch.optim.LBFGS):
        return f"{name} takes steps whose size follows from values"
    return f"{name} is no class of torch.optim's own"


def is_watched(optimizer: Any) -> bool:
    """Whether something runs around the step that would see a step which is undone: a hook, a `step` put in place.

    Accelerate puts one there, and takes a step for skipped that was not called.
    """
    patched = vars(optimizer).get("step")
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    return bool(
        any(hooks)
        or _optimizer._global_optimizer_pre_hooks
        or _optimizer._global_optimizer_post_hooks
        or (patched is not None and not hasattr(patched, "_wrapped_by_lr_sched"))
    )


def select(optimizer: Any, flags: Flags, step: Callable[[], Any]) -> Any:
    """Call `step`, which steps the optimizer, and undo it where a flag is set; return what it returned.

    Where there is an obstacle the flag is read on the host instead, with a warning once an optimizer.

    Raises:
        RuntimeError: the flag would be read while a CUDA graph is being captured.
    """
    reason = obstacle(optimizer)
    if reason is None:
        made = Made(optimizer)
        changing = [*made.params, *(v for entry in made.entries for v in entry.values() if isinstance(v, Tensor))]
        reason = _obstacle_of_tensors(optimizer, made.params)
    if reason is not None:
        _warn(optimizer, reason)
        return None if read(flags) else step()
    with torch.no_grad():
        kept = [torch.empty_like(tensor) for tensor in changing]
        torch._foreach_copy_(kept, changing)
    try:
        return step()
    finally:
        with torch.no_grad():
            found = {device: flag != 0 for device, flag in flags.items()}
            for tensor, old in zip(changing, kept):
                torch.where(found[tensor.device], old, tensor, out=tensor)
        made.remove(flags)


def _obstacle_of_tensors(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> str | None:
    for param in params:
        if type(param) not in (Tensor, torch.nn.Parameter):
            return f"a parameter is a {type(param).__name__}"
        for value in optimizer.state.get(param, {}).values():
            if isinstance(value, Tensor) and value.device != param.device:
                return f"{type(optimizer).__name__} keeps tensors on the host (capturable=True or fused=True does not)"
    return None


class Made:
    """The state an optimizer has before a step, so that what the step makes can be told from it and removed."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.params = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        _make_state(optimizer, self.params)
        self.entries = [optimizer.state[param] for param in self.params if param in optimizer.state]
        self._names = [{name for name, value in entry.items() if value is not None} for entry in self.entries]
        self._state = optimizer.state

    def remove(self, flags: Flags) -> None:
        """Remove what the step made, if it made anything and a flag is set: only then is the flag read."""
        made: list[tuple[Any, Any]] = [
            (entry, name)
            for entry, names in zip(self.entries, self._names)
            for name, value in entry.items()
            if value is not None and name not in names
        ]
        known = {id(entry) for entry in self.entries}
        made += [(self._state, p) for p in self.params if p in self._state and id(self._state[p]) not in known]
        if made and read(flags):
            for place, name in made:
                del place[name]


def _make_state(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> None:
    """Make the state that the first step of a known class would begin with, so that it can be selected."""
    if type(optimizer) not in _KNOWN or all(optimizer.state.get(param) for param in params):
        return
    init_group = optimizer._init_group  # type: ignore[attr-defined]
    lists = len(inspect.signature(init_group).parameters) - 1
    with torch.no_grad():
        for group in optimizer.param_groups:
            init_group(group, *([] for _ in range(lists)))
            if type(optimizer) is torch.optim.SGD and group["momentum"] != 0 and group["dampening"] == 0:
                # its first buffer is the gradient itself, which a later step makes of zeros; the fused kernel, where
                # the first step is skipped, leaves uninitialized memory in it
                for param in group["params"]:
                    if param.grad is not None and optimizer.state[param].get("momentum_buffer") is None:
                        optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param.grad)


def _warn(optimizer: torch.optim.Optimizer, reason: str) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"GradScaler.step: optimizer must be one whose step can be undone to be captured; {reason}")
    if optimizer not in _warned:
        _warned.add(optimizer)
        warnings.warn(
            f"GradScaler.step: a skipped step cannot be undone on the device, so found_inf is read on the host, as "
            f'torch.amp.GradScaler does: {reason}; skip="host" says that you know',
            stacklevel=5,
        )
