"""torch's loop with an optimizer's class on named parameters, and a step of funcamp with the same gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from funcamp import make_train_step


class TorchLoop:
    """An optimizer of torch's kind on clones of named parameters.

    Args:
        cls: its class.
        params: the parameters by name.
        **arguments: its arguments after the parameters.
    """

    def __init__(self, cls: Any, params: Mapping[str, Tensor], **arguments: Any) -> None:
        self.leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        self.optimizer: Any = cls(self.leaves.values(), **arguments)

    def step(self, grads: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Take a step with clones of the gradients; return the parameters after it."""
        for name, leaf in self.leaves.items():
            grad = grads[name]
            leaf.grad = None if grad is None else grad.clone()
        self.optimizer.step()
        return self.params()

    def params(self) -> dict[str, Tensor]:
        """The parameters now; the next step writes into them."""
        return {name: leaf.detach() for name, leaf in self.leaves.items()}


def randn_like(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Random gradients for named parameters."""
    return {name: torch.randn_like(value) for name, value in params.items()}


def linear_step(optimizer: Any) -> Any:
    """A step whose batch is the gradients: the loss is their product with the parameters."""

    def loss_fn(params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([(params[name] * batch[name]).sum() for name in params]).sum()

    return make_train_step(loss_fn, optimizer, policy=None)
