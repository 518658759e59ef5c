"""Gradients in one flat buffer, which the loop clears, and divides by the scale."""

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
parameters = list(model.parameters())
sizes = [parameter.numel() for parameter in parameters]
buffer = torch.zeros(sum(sizes))
for parameter, part in zip(parameters, buffer.split(sizes)):
    parameter.grad = part.view_as(parameter)
scaler = scaler_of()
for loss in losses(model):
    buffer.zero_()
    scaler.scale(loss).backward()
    buffer.div_(scaler.get_scale())
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    if torch.isfinite(buffer).all():
        optimizer.step()
