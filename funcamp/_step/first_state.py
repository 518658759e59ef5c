"""The state before the first step: parameters laid out, optimizer and scaler begun."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._autograd.loss import Loss
from funcamp._autograd.module_loss import ModuleLoss
from funcamp._check import boolean
from funcamp._scaler.first_state import init
from funcamp._step.options import lines_to_agree_on
from funcamp._step.parallel import Parallel
from funcamp._step.state import TrainState
from funcamp._storage.inputs import check_params, lay_out
from funcamp._storage.params import clone
from funcamp._types import Tree

if TYPE_CHECKING:
    from funcamp._step.step import TrainStep

#: A label for a parameter's group, from its name and the tensor.
Group = Callable[[str, Tensor], str]


def first_state(
    step: TrainStep, params: Tree, buffers: Any, *, flat: bool, group: Group | None, consume: bool
) -> TrainState:
    """Return the state of `TrainStep.init`."""
    call = "init"
    loss_fn = step.loss_fn
    options = step.options
    parallel = options.parallel
    if isinstance(params, (torch.nn.Module, Iterator)):
        raise TypeError(
            f"init: params must be a pytree of tensors, such as a dict; got {type(params).__name__}: a loss of "
            "module_loss has its module's, init()"
        )
    _check_labels(call, parallel, flat, group)
    consumed = consumed_loss(call, step, params, buffers, consume)

    # The parameters and buffers to begin with: the caller's, or the module's.
    is_modules_own = params is None
    if buffers is None:
        buffers = loss_fn.buffers()
    _check_buffers(loss_fn, buffers)
    parallel.agree(lines_to_agree_on(loss_fn, step.optimizer, step.config, options, flat))

    # Stored as the state has them, with the first rank's values.
    with torch.no_grad():  # params may require grad
        stored = lay_out(
            call,
            loss_fn.params() if is_modules_own else params,
            group or step.group,
            uncast_names=loss_fn.uncast_names,
            flat=flat,
            buckets=parallel.buckets,
        )
        check_params(call, stored, loss_fn.param_shapes)
        buffers = clone(buffers)
        if consumed is not None:
            consumed.adopt(stored, buffers)
        parallel.broadcast_first(stored)
        parallel.broadcast_first(buffers)
        parallel.broadcast_first(_frozen(loss_fn))
        stored = parallel.own_part(stored)
    device = next((group.device for group in stored.groups if group is not None), None)
    if device is None:
        raise ValueError(
            f"init: params must hold a tensor; got {_tree.brief(stored.tree())} (a module's frozen parameters are not "
            "among them)"
        )
    if is_modules_own:
        loss_fn.state_was_made(shares_memory=consumed is not None)
    count = torch.zeros((), dtype=torch.int64, device=device)
    return TrainState(
        step=count,
        skipped=count.clone(),
        consecutive_skips=count.clone(),
        params=stored,
        opt_state=step.chain.init(stored),
        scaler=init(step.config, device=device),
        buffers=buffers,
    )


def _frozen(loss_fn: Loss) -> dict[str, Tensor]:
    """Return the frozen parameters that are plain tensors, by name: a quantized one has no memory of its own."""
    frozen: dict[str, Tensor] = {}
    for name, parameter in loss_fn.module_parameters().items():
        is_plain = not parameter.is_quantized and not hasattr(parameter, "__tensor_flatten__")
        if is_plain and not parameter.requires_grad:
            frozen[name] = parameter
    return frozen


def _check_buffers(loss_fn: Loss, buffers: object) -> None:
    """Raise TypeError or ValueError if these are not the buffers that a loss takes."""
    if not isinstance(buffers, dict) or not all(isinstance(value, Tensor) for value in buffers.values()):
        raise TypeError(f"init: buffers must be a dict of tensors; got {_tree.brief(buffers)}")
    for name, value in buffers.items():
        if value.layout != torch.strided:
            raise TypeError(
                f"init: buffers[{name!r}] must be strided; got layout {value.layout}: make it dense, or keep its "
                "indices and values as buffers"
            )
    if buffers and not loss_fn.has_buffers:
        raise ValueError(f"init: buffers must be None for a loss without; got {_tree.brief(buffers)}")
    module_buffers = loss_fn.buffers()
    if module_buffers and buffers.keys() != module_buffers.keys():
        odd = min(buffers.keys() ^ module_buffers.keys())
        raise ValueError(f"init: buffers must have the names of the module's; they differ in {odd!r}")


def _check_labels(call: str, parallel: Parallel, flat: bool, group: Group | None) -> None:
    """Raise TypeError or ValueError for a group that is no function, and for what needs flat storage without it."""
    if group is not None and not callable(group):
        raise TypeError(f"{call}: group must be callable; got {_tree.brief(group)}")
    if not boolean(call, "flat", flat) and (group or parallel.shard):
        reason = "a group" if group else repr(parallel)
        raise ValueError(f"{call}: flat must be True with {reason}; got False")


def consumed_loss(call: str, step: TrainStep, params: Tree, buffers: object, consume: bool) -> ModuleLoss | None:
    """Return the loss whose module is to share the state's memory; None without consume.

    Raises:
        TypeError: consume is not a bool, or the loss has no module.
        ValueError: params or buffers are given, or the state is sharded.
    """
    if not boolean(call, "consume", consume):
        return None
    if not isinstance(step.loss_fn, ModuleLoss):
        raise TypeError(
            f"{call}: consume must be False for a loss that module_loss did not make, as there is no module whose "
            f"place the state could take; got True with {step.loss_fn!r}"
        )
    if params is not None or buffers is not None:
        name, value = ("buffers", buffers) if params is None else ("params", params)
        raise ValueError(
            f"{call}: consume must be False if params or buffers are given, as it takes the module's own; got "
            f"True and {name}={_tree.brief(value)}"
        )
    if step.options.parallel.shard:
        raise ValueError(
            f"{call}: consume must be False with {step.options.parallel!r}, because a parameter of the module "
            'cannot be a view of a part; got True. model.to("meta") after init frees the memory of a module without '
            "frozen parameters, which a step reads"
        )
    return step.loss_fn
