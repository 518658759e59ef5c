"""Gradients in one flat buffer, which the loop divides by the scale."""

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
parameters = list(model.parameters())
sizes = [parameter.numel() for parameter in parameters]
buffer = torch.zeros(sum(sizes))
for parameter, part in zip(parameters, buffer.split(sizes)):
    parameter.grad = part.view_as(parameter)
scaler = scaler_of()
for number, (x, y) in enumerate(batches(8)):
    buffer.zero_()
    with torch.autocast("cpu", torch.float16):
        loss = mse_loss(model(x), y)
    scaler.scale(loss).backward()
    if number % 2:
        buffer.div_(scaler.get_scale())
    else:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.div_(scaler.get_scale())
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    if torch.isfinite(buffer).all():
        optimizer.step()
