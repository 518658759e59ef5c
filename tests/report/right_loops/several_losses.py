"""Several losses of one batch: differentiated by one line, or scaled and differentiated from iterators."""

import torch
from torch.nn.functional import l1_loss, mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
for step, (x, y) in enumerate(batches(9)):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        output = model(x)
        losses = [mse_loss(output, y), l1_loss(output, y)]
    if step % 3 == 0:
        for number, loss in enumerate(losses):
            scaler.scale(loss).backward(retain_graph=number == 0)
    elif step % 3 == 1:
        torch.autograd.backward(list(scaler.scale(iter(losses))))
    else:
        torch.autograd.backward(map(scaler.scale, losses))  # type: ignore[arg-type]
    scaler.step(optimizer)
    scaler.update()
