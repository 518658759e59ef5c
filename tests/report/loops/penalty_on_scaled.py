"""A gradient penalty from gradients of the scaled loss; PyTorch's AMP examples divide them by the scale first."""

import sys

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for loss in losses(model):
    optimizer.zero_grad()
    gradients = torch.autograd.grad(scaler.scale(loss), [*model.parameters()], create_graph=True)
    if right:
        inverse = 1.0 / scaler.get_scale()
        gradients = tuple(gradient * inverse for gradient in gradients)
    norm = torch.stack([gradient.pow(2).sum() for gradient in gradients]).sum().sqrt()
    scaler.scale(loss + 1e-4 * norm).backward()  # wrong
    scaler.step(optimizer)
    scaler.update()
