"""Optimizers as other packages write them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

#: What a class keeps of a parameter, or in its group.
Kept = dict[str, Any]


class Base(torch.optim.Optimizer):
    """Steps by `move`, for each parameter with its state."""

    options: ClassVar[Kept] = {}

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, **self.options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        self.begin(group)
        for p in group["params"]:
            if p.grad is not None:
                self.move(p, self.state[p], group)

    def begin(self, group: Kept) -> None:
        """Change what all parameters share."""

    def move(self, p: Any, state: Kept, group: Kept) -> None:
        p.sub_(p.grad, alpha=group["lr"])


class ScheduleFree(Base):
    """Evaluates with a mean of its parameters."""

    options: ClassVar[Kept] = {"train_mode": False}

    def train(self) -> None:
        self.param_groups[0]["train_mode"] = True

    def eval(self) -> None:
        for p in self.param_groups[0]["params"]:
            if "mean" in self.state[p]:
                p.data.copy_(self.state[p]["mean"])
        self.param_groups[0]["train_mode"] = False

    def move(self, p: Any, state: Kept, group: Kept) -> None:
        mean = state.setdefault("mean", p.clone())
        super().move(p, state, group)
        mean.lerp_(p, 0.25)
