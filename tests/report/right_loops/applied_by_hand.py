"""Gradients that the scaler unscales, and that the loop applies without an optimizer's step."""

import torch

from tests.report.loops.parts import gradients_of, losses, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    gradients = gradients_of(model)
    if all(torch.isfinite(gradient).all() for gradient in gradients):
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients):
                parameter.sub_(gradient, alpha=0.01)
    scaler.update()
