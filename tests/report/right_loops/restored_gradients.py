"""Gradients of two losses that are kept, cleared and written back, and a scale that a property reads."""

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
parameters = list(model.parameters())


class Scale:
    def __init__(self) -> None:
        self.scaler = scaler_of()

    @property
    def value(self) -> float:
        return self.scaler.get_scale()


scale = Scale()
skips = 0
for x, y in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        outputs = model(x)
        losses = [mse_loss(outputs, y), outputs.abs().mean()]
    kept = []
    for loss in losses:
        scale.scaler.scale(loss).backward(retain_graph=True)
        kept.append([parameter.grad.clone() for parameter in parameters if parameter.grad is not None])
        optimizer.zero_grad(set_to_none=False)
    for parameter, first, second in zip(parameters, *kept):
        assert parameter.grad is not None
        parameter.grad.copy_(0.5 * first + 0.5 * second)
    before = scale.value
    scale.scaler.step(optimizer)
    scale.scaler.update()
    skips += scale.value < before
