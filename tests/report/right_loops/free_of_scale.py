"""Scaled gradients that are used for a direction, a cosine or a check for inf, or lose their mean."""

import torch
from torch.nn.functional import cosine_similarity

from tests.report.loops.parts import batches, loss_of, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
weight, *_ = parameters = list(model.parameters())
previous = torch.ones_like(weight)
for x, y in batches():
    optimizer.zero_grad()
    scaler.scale(loss_of(model, x.requires_grad_(), y)).backward()
    gradient = weight.grad
    assert gradient is not None
    assert x.grad is not None

    # A step of a fixed length, as in adversarial training.
    moved = x + 0.1 * x.grad / torch.clamp(x.grad.norm(dim=1, keepdim=True), min=1e-8)

    # Cosines, and the noise over the size.
    flat = gradient.flatten()
    cosine = torch.dot(flat, previous.flatten()) / (flat.norm() * previous.norm() + 1e-12)
    numbers = [cosine, cosine_similarity(gradient, previous, dim=0).mean(), gradient.std() / gradient.abs().mean()]
    largest = max(number.item() for number in numbers)
    if torch.dot(flat, previous.flatten()) < 0:
        flat = flat - torch.dot(flat, flat) * flat / flat.norm() ** 2
    previous = gradient.clone()

    # Checks for inf.
    assert all(torch.isfinite(one.grad.sum()) for one in parameters if one.grad is not None)
    assert not (gradient.abs().max() == torch.inf).item()

    # Gradients without their mean.
    gradient.add_(-gradient.mean(dim=1, keepdim=True))
    scaler.step(optimizer)
    scaler.update()
