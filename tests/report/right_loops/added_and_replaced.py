"""What looks like noise or a replaced overflow in scaled gradients, and is right."""

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
histograms = []
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        # A weight decay, and noise, times the scale.
        parameter.grad.add_(parameter.data, alpha=1e-4 * scaler.get_scale())
        parameter.grad.add_(0.01 * parameter.grad.abs().mean() * torch.randn_like(parameter))
        # Read, and not written back.
        histograms.append(torch.nan_to_num(parameter.grad).div(scaler.get_scale()).histc(8))
    scaler.step(optimizer)
    scaler.update()

# No scaler divides these.
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = torch.nn.functional.normalize(parameter.grad, dim=0)
        parameter.grad.nan_to_num_()
    optimizer.step()
