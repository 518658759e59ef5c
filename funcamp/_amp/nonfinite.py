"""Name the first parameter of an optimizer whose gradient is not finite."""

from __future__ import annotations

import torch


def describe_nonfinite(optimizer: torch.optim.Optimizer) -> str:
    """Return which gradient is not finite first, by the parameter's name if the optimizer has names. A sync."""
    has_gradients = False
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names", ())
        for index, parameter in enumerate(group["params"]):
            gradient = parameter.grad
            if gradient is None:
                continue
            has_gradients = True
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            if not torch.isfinite(values).all():
                name = names[index] if names else f"number {index} of group {number}, shape {tuple(parameter.shape)}"
                return f"the first parameter whose gradient is not finite is {name}"
    if not has_gradients:
        return "the gradients were cleared before they could be looked at"
    return "the gradients are finite by now"
