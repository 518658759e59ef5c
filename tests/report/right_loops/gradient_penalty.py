"""PyTorch's gradient penalty, at a first scale with which it overflows: the first losses are not finite."""

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of(init_scale=2.0**17)
for loss in losses(model, 8):
    optimizer.zero_grad()
    scaled_grads = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
    grads = [grad / scaler.get_scale() for grad in scaled_grads]
    with torch.autocast("cpu", torch.float16):
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
        loss = loss + norm
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
