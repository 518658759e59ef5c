"""Saves the model and the optimizer, and not the scaler (catalyst#991, ultralytics#22189)."""

import io
import sys

import torch

from tests.report.loops.parts import losses, model_and_optimizer, scaler_of

right = "--right" in sys.argv
model, optimizer = model_and_optimizer()
scaler = scaler_of()
for loss in losses(model):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
if right:
    saved["scaler"] = scaler.state_dict()
torch.save(saved, io.BytesIO())  # wrong
