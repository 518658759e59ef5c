"""An optimizer's selected step inside torch.compile: the class's arithmetic, then selective writes.

Dynamo cannot trace `Optimizer.step` in the graph that computed the gradients: torch.optim breaks the graph on purpose
(https://github.com/pytorch/pytorch/issues/104053), and `_init_group` rejects gradients computed in it. So the step runs
as `stateless` runs it. tests/upstream/test_upstream.py fails when this is no longer needed.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from funcamp import _upstream
from funcamp._optim.run import LeafState
from funcamp._optim.stateless import advance, by_branch, eager_only, first_state, stateless

#: A stand-in for None, and entries that are decided by torch.compile or are not arguments of a class.
_NONE = "<None>"
_DROPPED = ("params", "foreach", "fused", "differentiable", "capturable")


def select_compiled(optimizer: torch.optim.Optimizer, found: Tensor | None) -> None:
    """Step an optimizer of torch.optim if found, bool, shape (), is False; always if found is None.

    Use a tensor for a learning rate that changes: a number is a constant of the graph, so a new one recompiles.
    """
    for group in optimizer.param_groups:
        params = [param for param in group["params"] if param.grad is not None]
        if not params:
            continue
        options = {name: _sendable(value) for name, value in group.items() if name not in _DROPPED}
        states = [dict(optimizer.state[param]) if param in optimizer.state else {} for param in params]
        new, before, after = _traced(
            type(optimizer).__name__, options, params, [param.grad for param in params], states
        )
        with torch.no_grad():
            for param, value, first, later in zip(params, new, before, after):
                param.copy_(_chosen(found, param, value))
                if param in optimizer.state and len(optimizer.state[param]) > 0:
                    kept = optimizer.state[param]
                    for name, entry in later.items():
                        kept[name].copy_(_chosen(found, kept[name], entry))
                else:
                    optimizer.state[param] = {name: _chosen(found, first[name], later[name]) for name in later}


def _chosen(found: Tensor | None, old: Tensor, new: Tensor) -> Tensor:
    return new if found is None else torch.where(found, old, new)


_traced: Any = None


def prepare() -> None:
    """Prepare this module for torch.compile. Imports torch._dynamo, as any optimizer's first step does."""
    global _traced
    if _traced is not None:
        return
    nonstrict_trace = _upstream.find("torch._dynamo.nonstrict_trace")
    modes = _upstream.find("torch.utils._python_dispatch._disable_current_modes")  # `stateless` needs it
    lost = [name for name in (nonstrict_trace, modes) if not _upstream.usable(name)]
    _traced = eager_only(_step, lost[0].path) if lost else nonstrict_trace(_step)


def _step(
    name: str, options: dict[str, Any], params: list[Tensor], grads: list[Tensor], states: list[LeafState]
) -> tuple[list[Tensor], list[LeafState], list[LeafState]]:
    """Return new parameters, the states before the step (created if missing), and the states after it."""
    cls = getattr(torch.optim, name)  # by name, because a traced function takes no class
    accepted = inspect.signature(cls.__init__).parameters
    options = {name: _sent(value) for name, value in options.items()}
    optimizer = stateless(cls, **{name: value for name, value in options.items() if name in accepted})
    hyper = {name: options[name] for name in optimizer._traits.dynamic}
    if optimizer._traits.first_step_differs and not all(states):
        raise ValueError(
            f"GradScaler.step: optimizer must have taken a step before it is compiled, as the first step of "
            f"{cls.__name__} with these hyperparameters is another formula; got one without state"
        )
    before = [state or first_state(optimizer, param, hyper) for param, state in zip(params, states)]
    new, after = by_branch(
        optimizer, hyper, lambda unused: advance(optimizer, params, grads, before, before, hyper, unused)
    )
    return new, before, after


def _sendable(value: Any) -> Any:
    # a traced function accepts no None as a leaf
    if isinstance(value, (tuple, list)):
        return tuple([_sendable(item) for item in value])
    return _NONE if value is None else value


def _sent(value: Any) -> Any:
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        # Dynamo makes a number that changed symbolic; the class checks its arguments, so make it a guarded constant
        return float(value) if isinstance(value, torch.SymFloat) else int(value)
    if isinstance(value, (tuple, list)):
        return tuple(_sent(item) for item in value)
    return None if isinstance(value, str) and value == _NONE else value
