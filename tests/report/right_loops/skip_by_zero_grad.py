"""A bad batch is skipped by clearing its gradients before the step."""

import torch

from tests.report.loops.parts import batches, model_and_optimizer

model, optimizer = model_and_optimizer()
for number, (x, y) in enumerate(batches()):
    optimizer.zero_grad()
    (model(x * float("inf") if number == 3 else x) - y).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not torch.isfinite(norm):
        optimizer.zero_grad()
    optimizer.step()
