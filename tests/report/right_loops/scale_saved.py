"""A run that saves the scale by hand and another one that begins with it; a third one sets it."""

import io
from typing import Any

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of


def train(scaler: Any, saved: dict[str, Any] | None = None) -> dict[str, Any]:
    model, optimizer = model_and_optimizer()
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])
    for loss in losses(model, 3):
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return {"optimizer": optimizer.state_dict(), "training": {"scale": scaler.get_scale()}}


file = io.BytesIO()
torch.save(train(scaler_of(512.0)), file)
file.seek(0)
loaded = torch.load(file)
train(scaler_of(loaded["training"]["scale"]), loaded)
