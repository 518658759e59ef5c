"""A constant scale, multiplied and divided by the loop itself."""

import torch

from tests.report.loops.parts import losses, model_and_optimizer

model, optimizer = model_and_optimizer()
for loss in losses(model):
    optimizer.zero_grad()
    (loss * 128).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(128)
    optimizer.step()

for loss in losses(model):
    optimizer.zero_grad()
    (loss * 128).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad / 128
    optimizer.step()

SCALE = 128.0
own_model, own_optimizer = model_and_optimizer()


def unscale(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.div_(SCALE)


own_optimizer.register_step_pre_hook(unscale)
for loss in losses(own_model):
    own_optimizer.zero_grad()
    (loss * SCALE).backward()
    own_optimizer.step()
