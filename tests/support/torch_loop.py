"""torch's loop of automatic mixed precision; its optimizers on named parameters, and a step with the same gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from funcamp import ScalerConfig, make_train_step
from tests.recipes import advance, scaler_for


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


class AmpLoop:
    """torch's loop, as its automatic mixed precision examples have it.

    Args:
        model: the module that is trained.
        criterion: the loss of its output and a target.
        optimizer: torch's optimizer of its parameters.
        config: the numbers of torch's scaler.
        dtype: the precision of torch.autocast; None for no region.
    """

    def __init__(
        self,
        model: Any,
        criterion: Any,
        optimizer: Any,
        config: ScalerConfig,
        dtype: torch.dtype | None = torch.float16,
    ) -> None:
        self.model, self.criterion, self.optimizer, self.dtype = model, criterion, optimizer, dtype
        self.scaler = scaler_for(config, "cpu")

    def step(self, *pieces: Any, max_norm: float | None = None) -> tuple[Tensor, float, float]:
        """Take a step over micro-batches; return the mean of their losses, their scale, and whether it was skipped."""
        self.optimizer.zero_grad()
        losses = []
        for x, y in pieces:
            with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
                loss = self.criterion(self.model(x), y)
            losses.append(loss.detach())
            self.scaler.scale(loss / len(pieces)).backward()
        if max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.scaler.step(self.optimizer)
        return torch.stack(losses).mean(), *advance(self.scaler)
