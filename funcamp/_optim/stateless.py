"""torch.optim's optimizers, and others', as pure functions with an explicit state."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from funcamp import _tree
from funcamp._optim.arguments import EXAMPLE, no_parameters
from funcamp._optim.foreign.optimizer import ForeignOptimizer
from funcamp._optim.optimizer import StatelessOptimizer
from funcamp._optim.torch_optim import RULES
from funcamp._optim.torch_optim.optimizer import RuleOptimizer


def stateless(
    optimizer: type[torch.optim.Optimizer], *positional: NoReturn, **hyperparameters: Any
) -> StatelessOptimizer:
    """Return a torch.optim class as a pure optimizer.

    The result has `init(params) -> opt_state` and `update(params, grads, opt_state) -> (params, opt_state)`, which
    change no tensor of the caller. torch.optim's classes are written out as functions (`funcamp/_optim/torch_optim`).

    Of any other class its own `step` runs on tensors, of each parameter by itself or of all together, and never in flat
    storage. A number that it changes is a tensor of shape () between steps. If it branches on such a number or on a
    tensor, both sides run in every step and the condition selects, up to 16 ways in all. Making one compares eight of
    its steps with those of its own loop, and refuses it if they differ. While a step runs, functions of `math` take
    these numbers in this thread, and compiled functions run eager; no other state of Python or torch is set.

    Args:
        optimizer: a class of torch.optim but LBFGS and SparseAdam, or another subclass of `torch.optim.Optimizer` whose
            step needs no closure, draws no random numbers, has state of one form, and wraps no optimizer. One whose
            constructor wants something else than parameters first (groups with options) is given by a subclass whose
            constructor takes parameters.
        *positional: nothing; parameters are in the state, and hyperparameters have names.
        **hyperparameters: the class's arguments. A number is a constant of the compiled graph; a floating-point tensor
            of shape () is an input of it; a callable is a schedule: a pure function of the count of applied steps,
            int64, shape (), to a tensor of shape () or a number (`schedule` makes them from torch's schedulers). Each
            item of a tuple (betas) may be any of the three. The range of a tensor is not checked. fused, foreach
            and capturable choose how torch computes a step: they are accepted and change nothing.

    Returns:
        A `StatelessOptimizer`.

    Raises:
        TypeError: optimizer is not such a class; its step needs a closure, reads the host, or stores state that cannot
            become a value; it does not have a given hyperparameter; a tensor or a schedule is given for what chooses
            the algorithm, or a tensor holds no real number.
        ValueError: a hyperparameter is outside the class's range or is a tensor with dimensions; or differentiable is
            True, because no gradient flows through a step.

    Example:
        >>> adamw = stateless(torch.optim.AdamW, lr=lambda count: 1e-3 / (1 + count / 100), weight_decay=0.1)
        >>> params = {"w": torch.ones(2)}
        >>> params, opt_state = adamw.update(params, {"w": torch.ones(2)}, adamw.init(params))
        >>> opt_state.applied
        tensor(1)

    References:
        torch/optim, PyTorch 2.11 to 2.15.
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise TypeError(
            f"stateless: optimizer must be a subclass of torch.optim.Optimizer; got {_tree.brief(optimizer)}: write "
            f"{EXAMPLE}"
        )
    if positional:
        raise no_parameters(positional[0])
    if optimizer in RULES:
        return RuleOptimizer(optimizer, hyperparameters)
    return ForeignOptimizer(optimizer, hyperparameters)
