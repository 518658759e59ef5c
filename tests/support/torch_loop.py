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
        self.put(grads)
        self.optimizer.step()
        return self.params()

    def put(self, grads: Mapping[str, Tensor | None]) -> None:
        """Give the parameters clones of these gradients."""
        for name, leaf in self.leaves.items():
            grad = grads[name]
            leaf.grad = None if grad is None else grad.clone()

    def params(self) -> dict[str, Tensor]:
        """The parameters now; the next step writes into them."""
        return {name: leaf.detach() for name, leaf in self.leaves.items()}


class ScaledLoop(TorchLoop):
    """The same with a scaler: gradients are given as `backward` of a scaled loss leaves them."""

    def __init__(self, scaler: Any, cls: Any, params: Mapping[str, Tensor], **arguments: Any) -> None:
        super().__init__(cls, params, **arguments)
        self.scaler = scaler
        scaler.scale(torch.zeros(()))

    def step(
        self, grads: Mapping[str, Tensor | None], *, max_norm: float | None = None, new_scale: Any = None
    ) -> dict[str, Tensor]:
        """Take a step, clipped after `unscale_` if there is a max_norm; return the parameters after it."""
        self.put(grads)
        if max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(list(self.leaves.values()), max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update(new_scale)
        return self.params()


def randn_like(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Random gradients for named parameters."""
    return {name: torch.randn_like(value) for name, value in params.items()}


def linear_step(optimizer: Any) -> Any:
    """A step whose batch is the gradients: the loss is their product with the parameters."""

    def loss_fn(params: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([(params[name] * batch[name]).sum() for name in params]).sum()

    return make_train_step(loss_fn, optimizer, policy=None)
