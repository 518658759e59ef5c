"""A norm whose root is taken at 0 after the first step: its gradients are NaN, and each later step is skipped."""

import sys

import torch

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for step, (x, _) in enumerate(batches(12)):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        outputs = model(x)
    difference = outputs.float() - outputs.detach().float() * (step > 0)
    norm = (difference.square().sum(1) + right * 1e-6).sqrt()
    scaler.scale(norm.mean()).backward()  # wrong
    scaler.step(optimizer)
    scaler.update()
