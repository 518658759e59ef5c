"""A constant scale, multiplied and divided by the loop itself: in place, or in a hook of the step."""

import torch

from tests.report.loops.parts import gradients_of, losses, model_and_optimizer

SCALE = 128.0
model, optimizer = model_and_optimizer()
for loss in losses(model):
    optimizer.zero_grad()
    (loss * SCALE).backward()
    for gradient in gradients_of(model):
        gradient.div_(SCALE)
    optimizer.step()

own_model, own_optimizer = model_and_optimizer()


def unscale(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.grad / SCALE


own_optimizer.register_step_pre_hook(unscale)
for loss in losses(own_model):
    own_optimizer.zero_grad()
    (loss * SCALE).backward()
    own_optimizer.step()
