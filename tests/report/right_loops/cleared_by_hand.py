"""Gradients that the loop itself clears: other zeros, a filled gradient, one buffer of all gradients."""

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
parameters = list(model.parameters())
buffer = torch.zeros(sum(parameter.numel() for parameter in parameters))
for number, loss in enumerate(losses(model, 12)):
    if number < 4:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
    elif number < 8:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.fill_(0)
    elif number == 8:
        for parameter, part in zip(parameters, buffer.split([parameter.numel() for parameter in parameters])):
            parameter.grad = part.view_as(parameter)
    else:
        buffer.zero_()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
