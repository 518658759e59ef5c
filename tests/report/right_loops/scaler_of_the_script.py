"""A class of scalers that the script defines, with a `scale` of its own."""

import torch
from torch import Tensor

from tests.report.loops.parts import losses, model_and_optimizer


class OfOneLoss(torch.amp.GradScaler):
    def scale(self, loss: Tensor) -> Tensor:  # type: ignore[override]
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(loss.device)
        return loss * self.get_scale()


model, optimizer = model_and_optimizer()
scaler = OfOneLoss("cpu", init_scale=2.0**10)
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
