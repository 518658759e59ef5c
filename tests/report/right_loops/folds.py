"""Cross-validation: for each fold a new model, a new optimizer and a new scaler."""

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

for _ in range(3):
    model, optimizer = model_and_optimizer()
    scaler = scaler_of()
    for loss in losses(model, 3):
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
