"""A first scale that is much too high: the first steps are skipped, and the run ends soon after."""

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of(init_scale=2.0**32)
for loss in losses(model, 10):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
