"""No mixed precision: float32, a closure, an unscaled bfloat16 loop, sums of a window."""

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer

model, optimizer = model_and_optimizer()
scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3)
for x, y in batches():
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()

lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)
for x, y in batches(3):

    def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
        lbfgs.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        return loss

    lbfgs.step(closure)

for x, y in batches():
    optimizer.zero_grad()
    for row, target in zip(x, y):
        with torch.autocast("cpu", torch.bfloat16):
            loss = mse_loss(model(row), target, reduction="sum") / len(x)
        loss.backward()
    optimizer.step()

disabled = torch.amp.GradScaler("cpu", enabled=False)
for x, y in batches():
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = mse_loss(model(x), y)
    disabled.scale(loss).backward()
    disabled.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    disabled.step(optimizer)
    disabled.update()
    scale = disabled.get_scale()
