"""The usual loop of a GAN with autocast, detach and a torch.amp.GradScaler for each network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.recipes import Trace, advance, scaler_for, values

TOLERANCE = 2.0**-16


def oracle(recipe: Any, steps: int, device: str) -> tuple[list[dict[str, Tensor]], Trace]:
    generator, discriminator = (model.to(device) for model in recipe.make_models())
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-2, betas=(0.5, 0.9))
    g_scaler, d_scaler = scaler_for(recipe.CONFIG, device), scaler_for(recipe.CONFIG, device)
    trace = []
    for index in range(steps):
        real, noise = recipe.batch(index, device)
        ones, zeros = torch.ones(len(real), 1, device=device), torch.zeros(len(real), 1, device=device)

        d_optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            fake = generator(noise)
            logits = discriminator(torch.cat([real, fake.detach()]))
            d_loss = recipe.criterion(logits, torch.cat([ones, zeros]))
        d_scaler.scale(d_loss).backward()
        d_scaler.step(d_optimizer)

        g_optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            g_loss = recipe.criterion(discriminator(fake), ones)
        g_scaler.scale(g_loss).backward()
        g_scaler.step(g_optimizer)

        rows = [advance(scaler) for scaler in (g_scaler, d_scaler)]
        trace.append(([scale for scale, _ in rows], [found for _, found in rows]))
    return [values(generator), values(discriminator)], trace
