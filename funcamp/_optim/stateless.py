"""torch.optim's optimizers, and others', as pure functions with an explicit state."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from funcamp._optim.foreign.optimizer import ForeignOptimizer
from funcamp._optim.optimizer import StatelessOptimizer
from funcamp._optim.torch_optim import RULES
from funcamp._optim.wrong_arguments import check_class, refuse_positional


def stateless(
    optimizer: type[torch.optim.Optimizer], *positional: NoReturn, **hyperparameters: Any
) -> StatelessOptimizer:
    """Return a torch.optim class as a pure optimizer.

    The result has `init(params) -> opt_state` and `update(params, grads, opt_state) -> (params, opt_state)`. The
    class's own `step` runs on clones, with its state set from opt_state, in eager mode and under torch.compile. It does
    not change the caller's tensors. A number that it changes in its state, its parameter group or an attribute is a
    tensor of shape () between steps: the class computes with it as with a number, also by `math`, `min`, `max`, `float`
    and `int`. Where it branches on such a number or on a tensor, both sides run in every step and the condition
    selects, up to 16 ways in all. So an expensive branch that a loop takes rarely costs its time in every step.

    Creating it runs the class on a few numbers, and refuses it if its steps as a function come to other numbers than
    its own. While a step runs, the modules of its class find functions of their own for `math`, `min`,
    `max`, `float` and `int`, which do what Python's do for all other values. No global state of torch is set, so other
    threads may run optimizers.

    Args:
        optimizer: a class of torch.optim but LBFGS and SparseAdam, or another subclass of `torch.optim.Optimizer` whose
            step needs no closure, draws no random numbers in a branch, and has state of one form. One whose constructor
            wants something else than parameters first (an optimizer to wrap, groups with options) is given by a
            subclass whose constructor takes parameters.
        *positional: nothing; parameters are in the state, and hyperparameters have names.
        **hyperparameters: the class's arguments. A number is a constant of the compiled graph; a tensor of shape () is
            an input of it; a callable is a schedule: a pure function of the count of applied steps, int64, shape (), to
            a tensor of shape () or a number (`schedule` makes them from torch's schedulers). Each item of a tuple
            (betas) may be any of the three. The range of a tensor is not checked. A class (of a wrapper's inner
            optimizer) is a constant. capturable is accepted and not used.

    Returns:
        A `StatelessOptimizer`.

    Raises:
        TypeError: optimizer is not such a class; its step needs a closure, reads the host, or stores state that cannot
            become a value; it does not have a given hyperparameter; a tensor or a schedule is given for what chooses
            the algorithm.
        ValueError: a hyperparameter is outside the class's range, or sets fused, foreach or differentiable.

    Example:
        >>> adamw = stateless(torch.optim.AdamW, lr=lambda count: 1e-3 / (1 + count / 100), weight_decay=0.1)
        >>> params = {"w": torch.ones(2)}
        >>> params, opt_state = adamw.update(params, {"w": torch.ones(2)}, adamw.init(params))
        >>> opt_state.applied
        tensor(1)

    References:
        torch/optim, PyTorch 2.11 to 2.15.
    """
    check_class(optimizer)
    refuse_positional(optimizer, positional)

    if optimizer in RULES:
        return StatelessOptimizer(optimizer, hyperparameters)
    return ForeignOptimizer(optimizer, hyperparameters)
