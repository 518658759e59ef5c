"""Norms that are divided by the scale on the host, and bounds that are multiplied by it."""

import torch

from tests.report.loops.parts import gradients_of, losses, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
norms = []


def bound(max_norm: float) -> float:
    scale: float = scaler.get_scale()
    return max_norm * scale


for number, loss in enumerate(losses(model, 9)):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    gradients = gradients_of(model)
    norm = sum(gradient.norm().item() ** 2 for gradient in gradients) ** 0.5
    if number % 3 == 0:
        norms.append(norm / float(scaler.get_scale()))
    elif number % 3 == 1:
        scale = scaler.get_scale()
        norms.append(norm / scale)
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), bound(1.0))
    scaler.step(optimizer)
    scaler.update()
