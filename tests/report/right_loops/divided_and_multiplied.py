"""The loop divides the gradients by the scale, and multiplies them by it for scaler.step."""

from tests.report.loops.parts import gradients_of, losses, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scale = scaler.get_scale()
    for gradient in gradients_of(model):
        gradient.div_(scale)
        gradient.mul_(scale)
    scaler.step(optimizer)
    scaler.update()
