"""The loop divides the gradients of a sum by the number of tokens, which is the scale by chance."""

from tests.report.loops.parts import gradients_of, losses, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    for gradient in gradients_of(model):
        gradient.div_(1024)
    scaler.step(optimizer)
    scaler.update()
