"""An optimizer's selected step inside torch.compile: the class's arithmetic, then selective writes.

Dynamo cannot trace `Optimizer.step` in the graph that computed the gradients: torch.optim breaks the graph on purpose
(https://github.com/pytorch/pytorch/issues/104053), and `_init_group` rejects gradients computed in it. So the step runs
as `stateless` runs it. tests/upstream/test_upstream.py fails when this is no longer needed.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor

from funcamp import _upstream
from funcamp._optim.class_optimizer import ClassOptimizer, eager_only
from funcamp._optim.class_state import ClassState, Entries

#: A stand-in for None among the arguments of a traced function, which accepts no None as a leaf.
_NONE = "<None>"

#: Entries of a parameter group that torch.compile decides or that are not arguments of a class.
_DROPPED = ("params", "foreach", "fused", "differentiable", "capturable")


def select_compiled(optimizer: torch.optim.Optimizer, skips: Tensor | None) -> None:
    """Step an optimizer of torch.optim if skips, bool, shape (), is False; always if skips is None.

    Use a tensor for a learning rate that changes: a number is a constant of the graph, so a new one recompiles.
    """
    for group in optimizer.param_groups:
        params = [param for param in group["params"] if param.grad is not None]
        if not params:
            continue
        grads = [param.grad for param in params]
        arguments = {name: _encoded(value) for name, value in group.items() if name not in _DROPPED}
        states = [dict(optimizer.state[param]) if param in optimizer.state else {} for param in params]
        new_params, old_states, new_states = _nonstrict_step(type(optimizer).__name__, arguments, params, grads, states)
        with torch.no_grad():
            for param, new_param, old_state, new_state in zip(params, new_params, old_states, new_states):
                param.copy_(_selected(skips, param, new_param))
                _write_state(optimizer, param, old_state, new_state, skips)


def _write_state(
    optimizer: torch.optim.Optimizer, param: Tensor, old_state: Entries, new_state: Entries, skips: Tensor | None
) -> None:
    """Give a parameter its new state, or the old one in a skipped step: in place, or as a first state."""
    has_state = param in optimizer.state and len(optimizer.state[param]) > 0
    if has_state:
        state = optimizer.state[param]
        for name, new_value in new_state.items():
            state[name].copy_(_selected(skips, state[name], new_value))
        return
    first_state: Entries = {}
    for name, new_value in new_state.items():
        first_state[name] = _selected(skips, old_state[name], new_value)
    optimizer.state[param] = first_state


def _selected(skips: Tensor | None, old: Tensor, new: Tensor) -> Tensor:
    """Return the old value in a skipped step, else the new one."""
    return new if skips is None else torch.where(skips, old, new)


#: `_step`, which Dynamo puts into the graph without tracing its Python; made by `prepare_for_compile`.
_nonstrict_step: Any = None


def prepare_for_compile() -> None:
    """Prepare this module for torch.compile. Imports torch._dynamo, as any optimizer's first step does."""
    global _nonstrict_step
    if _nonstrict_step is not None:
        return
    nonstrict_trace = _upstream.find("torch._dynamo.nonstrict_trace")
    disable_modes = _upstream.find("torch.utils._python_dispatch._disable_current_modes")  # `stateless` needs it
    lost = [found for found in (nonstrict_trace, disable_modes) if not _upstream.usable(found)]
    _nonstrict_step = eager_only(_step, lost[0].path) if lost else nonstrict_trace(_step)


def _step(
    class_name: str, arguments: dict[str, object], params: list[Tensor], grads: list[Tensor], states: list[Entries]
) -> tuple[list[Tensor], list[Entries], list[Entries]]:
    """Return new parameters, the states before the step (created if missing), and the states after it."""
    cls = getattr(torch.optim, class_name)  # by name, because a traced function takes no class
    accepted = inspect.signature(cls.__init__).parameters
    decoded = {name: _decoded(value) for name, value in arguments.items()}
    optimizer = ClassOptimizer(cls, {name: value for name, value in decoded.items() if name in accepted})
    traits = optimizer._traits
    hyper = {name: decoded[name] for name in traits.step.dynamic}
    if traits.step.first_step_differs and not all(states):
        raise ValueError(
            f"GradScaler.step: optimizer must have taken a step before it is compiled, as the first step of "
            f"{cls.__name__} with these hyperparameters is another formula; got one without state"
        )
    old_states: list[Entries] = []
    for param, state in zip(params, states):
        if not state:
            first = traits.first_state([param], hyper)
            state = first.per_param[0]
        old_states.append(state)
    later_step = dataclasses.replace(traits.step, first_step_differs=False)
    stepped = later_step(params, grads, ClassState(old_states, {}), hyper)
    return stepped.params, old_states, stepped.state.per_param


def _encoded(value: object) -> object:
    """Return a hyperparameter as a traced function takes it."""
    if isinstance(value, (tuple, list)):
        return tuple([_encoded(item) for item in value])
    return _NONE if value is None else value


def _decoded(value: object) -> object:
    """Return the hyperparameter that `_encoded` got, in the traced function."""
    # Dynamo makes a number that changed symbolic; the class checks its arguments, so make it a guarded constant.
    if isinstance(value, torch.SymFloat):
        return float(value)
    if isinstance(value, torch.SymInt):
        return int(value)
    if isinstance(value, (tuple, list)):
        return tuple(_decoded(item) for item in value)
    return None if isinstance(value, str) and value == _NONE else value
