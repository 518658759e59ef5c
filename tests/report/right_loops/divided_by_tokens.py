"""The loop divides the gradients of a sum by the number of tokens, which is the scale by chance."""

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    for gradient in [parameter.grad for parameter in model.parameters() if parameter.grad is not None]:
        gradient.div_(1024)
    scaler.step(optimizer)
    scaler.update()
