"""GradCache: the loss of a large batch of features, whose scaled gradients weight the features of each chunk."""

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()


def gradient_of_loss(features: Tensor, y: Tensor) -> Tensor:
    """The features are gone afterwards, their gradient is not."""
    features = features.detach().requires_grad_()
    scaler.scale(mse_loss(features, y)).backward()
    assert features.grad is not None
    return features.grad


for x, y in batches():
    optimizer.zero_grad()
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        features = torch.cat([model(chunk) for chunk in x.split(1)]).float()
    gradient = gradient_of_loss(features, y)
    for chunk, weights in zip(x.split(1), gradient.split(1)):
        with torch.autocast("cpu", torch.float16):
            outputs = model(chunk)
        torch.dot(outputs.float().flatten(), weights.flatten()).backward()
    scaler.step(optimizer)
    scaler.update()

# The same with torch.autograd.grad, then with gradients that are unscaled by a constant and scaled again.
for x, y in batches(3):
    optimizer.zero_grad()
    features = model(x).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(scaler.scale(mse_loss(features, y)), features)
    for chunk, weights in zip(x.split(1), gradient.split(1)):
        with torch.autocast("cpu", torch.float16):
            outputs = model(chunk)
        (outputs.float() * weights).sum().backward()
    scaler.step(optimizer)
    scaler.update()

for x, y in batches(3):
    optimizer.zero_grad()
    features = model(x).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(scaler.scale(mse_loss(features, y)), features)
    gradient.div_(2.0**10)
    with torch.autocast("cpu", torch.float16):
        outputs = model(x)
    scaler.scale((outputs.float() * gradient).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
