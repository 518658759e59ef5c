"""Take an optimizer's step and restore what it changed if a flag is set, without reading the flag.

The optimizer's own `step` runs in place. Parameters and state are copied before it and selected after it, element by
element: new if found_inf is 0, else old. This is correct only if everything that a step writes is known, so it is done
only for torch.optim's unmodified classes.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from funcamp import _upstream

#: found_inf for every device with gradients: float32, shape (), 1.0 or 0.0.
Flags = dict[torch.device, Tensor]

#: Steps of these write only parameters and tensors in a parameter's state.
_KNOWN = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.RMSprop, torch.optim.ASGD,
    torch.optim.Rprop, torch.optim.Muon,
)  # fmt: skip

# If hooks cannot be looked up, assume that there are some.
_GLOBAL_PRE_HOOKS = _upstream.find("torch.optim.optimizer._global_optimizer_pre_hooks", True)
_GLOBAL_POST_HOOKS = _upstream.find("torch.optim.optimizer._global_optimizer_post_hooks", True)

_warned: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def combine_flags(flags: list[Tensor], device: torch.device | None) -> Tensor:
    """Combine flags into one, 1.0 or 0.0, on a device; by default the first flag's."""
    found_inf = flags[0] if device is None else _on(device, flags[0])
    for flag in flags[1:]:
        found_inf = torch.maximum(found_inf, _on(found_inf.device, flag))
    return found_inf


def _on(device: torch.device, flag: Tensor) -> Tensor:
    """Return a flag on a device; the host waits for one that it will read."""
    return flag.to(device, non_blocking=device.type != "cpu")


def read_any(flags: Flags) -> bool:
    """Return on the host whether any flag is set; waits for the device."""
    return any(bool(flag != 0) for flag in flags.values())


def obstacle(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why a step cannot be undone when found_inf is set; None if it can."""
    if type(optimizer) in _KNOWN:
        return None
    name = type(optimizer).__name__
    if type(optimizer) in (torch.optim.SparseAdam, torch.optim.LBFGS):
        return f"{name} takes steps whose size follows from values"
    return f"{name} is no class of torch.optim's own"


def is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether something would observe a step that is undone: a hook, or a replaced `step`.

    Accelerate replaces `step`, and takes a step as skipped if it was not called.
    """
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return True
    if _GLOBAL_PRE_HOOKS or _GLOBAL_POST_HOOKS:
        return True
    # torch's schedulers replace `step` too, only to see that it was called before theirs.
    replaced_step = vars(optimizer).get("step")
    return replaced_step is not None and not hasattr(replaced_step, "_wrapped_by_lr_sched")


def select(
    optimizer: torch.optim.Optimizer, flags: Flags, step: Callable[[], object], reason: str | None = None
) -> object:
    """Call `step`, which steps the optimizer, and undo it if a flag is set; return its result.

    If there is an obstacle the flag is read on the host instead, with one warning per optimizer. An error of a step
    that is undone is not raised, because torch does not take that step.

    Args:
        optimizer: the optimizer.
        flags: found_inf for every device with gradients.
        step: its step.
        reason: an obstacle that the caller knows.

    Raises:
        RuntimeError: the flag would be read during the capture of a CUDA graph.
    """
    params = with_grads(optimizer)
    reason = reason or obstacle(optimizer) or _obstacle_of_tensors(optimizer, params)
    if reason is not None:
        _warn(optimizer, reason)
        return None if read_any(flags) else step()
    entries_before = entries(optimizer)
    written = _written_tensors(optimizer, params)
    copies = [torch.empty_like(tensor) for tensor in written]
    if written:
        with torch.no_grad():
            _upstream.copy_each(copies, written)
    try:
        return step()
    except Exception:
        if not read_any(flags):
            raise
        return None
    finally:
        _restore_if_set(flags, written, copies)
        # Only a first step adds entries to the state; then the flag is read.
        if entries(optimizer) != entries_before and read_any(flags):
            forget(optimizer, entries_before)


def _written_tensors(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> list[Tensor]:
    """Return the tensors into which a step may write."""
    written = list(params)
    for param in params:
        if param in optimizer.state:
            written += [value for value in optimizer.state[param].values() if isinstance(value, Tensor)]
    if _writes_grads(optimizer):
        for param in params:
            if param.grad is not None and not param.grad.is_sparse:
                written.append(param.grad)
    return written


def _restore_if_set(flags: Flags, tensors: list[Tensor], copies: list[Tensor]) -> None:
    """Write the copies back into the tensors if a flag is set, on their devices."""
    with torch.no_grad():
        is_set = combine_flags(list(flags.values()), None) != 0
        devices = {tensor.device for tensor in tensors}
        is_set_on = {device: _on(device, is_set) for device in devices}
        for tensor, copy in zip(tensors, copies):
            torch.where(is_set_on[tensor.device], copy, tensor, out=tensor)


def with_grads(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters that a step changes."""
    return [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]


def _obstacle_of_tensors(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> str | None:
    """Return why a step on these tensors cannot be undone; None if it can."""
    name = type(optimizer).__name__
    for param in params:
        if type(param) not in (Tensor, torch.nn.Parameter):
            return f"a parameter is a {type(param).__name__}"
        if param.layout != torch.strided:
            return "a parameter is sparse"
        for value in optimizer.state.get(param, {}).values():
            if not isinstance(value, Tensor):
                continue
            if value.device != param.device:
                return f"{name} keeps tensors on the host (capturable=True or fused=True does not)"
            if value.layout != torch.strided:
                return f"{name} keeps sparse tensors, whose sizes follow from the gradients"
    return None


def _writes_grads(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step may write gradients: SGD with foreach=True adds the momentum to them."""
    return type(optimizer) is torch.optim.SGD and any(group["nesterov"] for group in optimizer.param_groups)


#: For each parameter the names of its state's entries that have a value.
Entries: TypeAlias = dict[Tensor, set[str]]


def entries(optimizer: torch.optim.Optimizer) -> Entries:
    """Return the names of a state's entries that have a value, to find and remove later additions."""
    names_of = {}
    for param, state in optimizer.state.items():
        if isinstance(state, dict):
            names_of[param] = {name for name, value in state.items() if value is not None}
    return names_of


def forget(optimizer: torch.optim.Optimizer, entries_before: Entries) -> None:
    """Remove all entries of the state except these."""
    for param, names in entries(optimizer).items():
        if param not in entries_before:
            del optimizer.state[param]
            continue
        for name in names - entries_before[param]:
            del optimizer.state[param][name]


def _warn(optimizer: torch.optim.Optimizer, reason: str) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"GradScaler.step: optimizer must be one whose step can be undone to be captured; {reason}")
    if optimizer not in _warned:
        _warned.add(optimizer)
        warnings.warn(
            f"GradScaler.step: a skipped step cannot be undone on the device, so found_inf is read on the host, as "
            f'torch.amp.GradScaler does: {reason}; pass skip="host" to accept this',
            stacklevel=7,  # two frames are those of `_untraced`
        )
