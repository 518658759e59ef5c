"""An optimizer that wraps another, which is stepped (sharpness-aware minimization)."""

from typing import Any

import torch

from tests.report.loops.parts import batches, loss_of, model_and_optimizer, scaler_of


class Sharpness(torch.optim.Optimizer):
    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})

    @torch.no_grad()
    def climb(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["before"] = parameter.clone()
            parameter.add_(parameter.grad, alpha=0.01)
        self.zero_grad()

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, state in self.state.items():
            parameter.copy_(state["before"])

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError


model, base_optimizer = model_and_optimizer()
optimizer = Sharpness(base_optimizer)
scaler = scaler_of()
for x, y in batches():
    for is_second in (False, True):
        loss = loss_of(model, x, y)
        scaler.scale(loss).backward()
        if is_second:
            optimizer.restore()
            scaler.step(base_optimizer)
        else:
            scaler.unscale_(base_optimizer)
            optimizer.climb()
        scaler.update()
    optimizer.zero_grad()
