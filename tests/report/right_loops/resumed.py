"""Saves and resumes model, optimizer and scaler."""

import io

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
scaler = scaler_of()
file = io.BytesIO()
for _ in range(2):
    for loss in losses(model, 3):
        optimizer.zero_grad(set_to_none=False)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    file.seek(0)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    torch.save(saved, file)
    file.seek(0)
    loaded = torch.load(file)
    model, optimizer = model_and_optimizer()
    scaler = scaler_of()
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    scaler.load_state_dict(loaded["scaler"])
