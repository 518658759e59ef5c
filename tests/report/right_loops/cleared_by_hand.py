"""Gradients that the loop itself clears: other zeros, or a filled gradient. Some steps are left out."""

import torch

from tests.report.loops.parts import gradients_of, losses, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
for number, loss in enumerate(losses(model, 8)):
    if number < 4:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    else:
        for gradient in gradients_of(model):
            gradient.fill_(0)
    scaler.scale(loss).backward()
    if number % 3:
        scaler.step(optimizer)
        scaler.update()
