"""A training in float32, two phases, and folds, each with a scaler of its own; the scale is saved as a number."""

import copy
import io

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, losses, model_and_optimizer, scaler_of

model, optimizer = model_and_optimizer()
for x, y in batches(2):
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    optimizer.step()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, io.BytesIO())


def train() -> torch.amp.GradScaler:
    scaler = scaler_of()
    for loss in losses(model, 2):
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


frozen_scaler, full_scaler = train(), train()
first_state = copy.deepcopy(optimizer.state_dict())
for _fold in range(2):
    optimizer.load_state_dict(first_state)
    last_scaler = train()
torch.save({"optimizer": optimizer.state_dict(), "kept": {"scale": last_scaler.get_scale()}}, io.BytesIO())
