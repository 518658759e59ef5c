"""Gradients that are divided by a number that is the scale by chance, or by the scale and multiplied by it again."""

from torch.nn.utils import clip_grad_norm_

from tests.report.loops.parts import gradients_of, losses, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
for number, loss in enumerate(losses(model)):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    for gradient in gradients_of(model):
        if number % 2:
            gradient.div_(1024)
        else:
            gradient.div_(scaler.get_scale())
    if number % 2 == 0:
        clip_grad_norm_(model.parameters(), 1.0)
        for gradient in gradients_of(model):
            gradient.mul_(scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()
