"""Scaled gradients that are used for a sign, a direction, a check for inf, or the gradients without their mean."""

import torch

from tests.report.loops.parts import batches, loss_of, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
weight, *_ = parameters = list(model.parameters())
for x, y in batches():
    optimizer.zero_grad()
    x.requires_grad_()
    loss = loss_of(model, x, y)
    scaler.scale(loss).backward(retain_graph=True)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert weight.grad is not None
    assert x.grad is not None

    # Steps of a fixed length, as in adversarial training.
    norm = torch.norm(weight.grad)
    if norm != 0 and not torch.isnan(norm):
        weight.data.add_(0.01 * weight.grad / norm)
    direction = x.grad.clone().detach()
    lengths = direction.view(len(x), -1).norm(dim=1, keepdim=True)
    moved = x + 0.1 * direction / torch.clamp(lengths, min=1e-8)
    x.grad /= x.grad.norm(dim=1, keepdim=True) + 1e-8

    # Signs and checks.
    first, second = (gradient.flatten() for gradient in gradients[:2])
    if torch.dot(first[: len(second)], second) < 0:
        first = first - torch.dot(first, first) * first / first.norm() ** 2
    assert all(gradient.abs().sum() >= 0 for gradient in gradients)
    assert all(torch.isfinite(gradient.sum()) for gradient in gradients)
    assert not (weight.grad.abs().max() == torch.inf).item()

    # Gradients without their mean, of two losses.
    weight.grad.add_(-weight.grad.mean(dim=1, keepdim=True))
    both = torch.stack([torch.cat([gradient.flatten() for gradient in gradients])] * 2).mean(0)
    parts = both.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts):
        parameter.grad = part.view_as(parameter)
    scaler.step(optimizer)
    scaler.update()
