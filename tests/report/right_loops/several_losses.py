"""Several losses of one batch: of a line, from iterators, or the second without the scale after unscale_."""

import torch
from torch.nn.functional import l1_loss, mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
for step, (x, y) in enumerate(batches(12)):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        output = model(x)
        losses = [mse_loss(output, y), l1_loss(output, y)]
    if step % 4 == 0:
        for number, loss in enumerate(losses):
            scaler.scale(loss).backward(retain_graph=number == 0)
    elif step % 4 == 1:
        torch.autograd.backward(list(scaler.scale(iter(losses))))
    elif step % 4 == 2:
        torch.autograd.backward(map(scaler.scale, losses))  # type: ignore[arg-type]
    else:
        scaler.scale(losses[0]).backward(retain_graph=True)
        scaler.unscale_(optimizer)
        losses[1].backward()
    scaler.step(optimizer)
    scaler.update()

# A part of the loss is in float32 on purpose.
with torch.autocast("cpu", torch.float16):
    for x, y in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", enabled=False):
            weight = next(model.parameters())
            penalty = (weight @ weight.T).square().mean()
        scaler.scale(penalty).backward()
        scaler.scale(mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
