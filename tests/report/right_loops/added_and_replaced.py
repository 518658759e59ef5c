"""What looks like noise, a fixed length or a replaced overflow in scaled gradients, and is right."""

import torch
from torch.nn.functional import normalize

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
histograms = []
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    for parameter in model.parameters():
        assert parameter.grad is not None
        # A weight decay and noise that are times the scale.
        parameter.grad.add_(parameter.data, alpha=1e-4 * scale)
        parameter.grad.add_(0.01 * parameter.grad.abs().mean() * torch.randn_like(parameter))
        # A fixed length that is times the scale.
        parameter.grad = normalize(parameter.grad.flatten(), dim=0).view_as(parameter) * (0.37 * scale)
        # Read, and not written back.
        histograms.append(torch.nan_to_num(parameter.grad).div(scale).histc(8))
    scaler.step(optimizer)
    scaler.update()

# A constant scale that is known to the loop, and a part of the last gradient.
SCALE = 2.0**10
scaler = scaler_of(SCALE)
last_gradients = [torch.ones_like(parameter) for parameter in model.parameters()]
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    for parameter, last_gradient in zip(model.parameters(), last_gradients):
        gradient = parameter.grad
        assert gradient is not None
        gradient.add_(parameter.data, alpha=1e-2 * SCALE)
        part = gradient * (gradient * last_gradient).sum() / gradient.norm() ** 2
        last_gradient.copy_(gradient)
        parameter.grad = part
    scaler.step(optimizer)
    scaler.update()

# Steps of a fixed length that no scaler divides.
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = normalize(parameter.grad.flatten(), dim=0).view_as(parameter)
        parameter.grad.nan_to_num_()
    optimizer.step()
