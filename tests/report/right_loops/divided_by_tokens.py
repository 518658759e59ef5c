"""Gradients that are divided by a number that is the scale by chance, or by the scale and multiplied by it again."""

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
            gradient.mul_(scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()
