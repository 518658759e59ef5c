"""The usual loop of a GAN with autocast, detach and a torch.amp.GradScaler for each network."""

from __future__ import annotations

from typing import Any

import torch

from tests.recipes import Outcome, row_of, values
from tests.support.torch_loop import Scaled

TOLERANCE = 2.0**-16


def oracle(recipe: Any, steps: int, device: str) -> Outcome:
    generator, discriminator = (model.to(device) for model in recipe.make_models())
    g_loop, d_loop = (
        Scaled(torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.5, 0.9)), recipe.CONFIG, device)
        for model in (generator, discriminator)
    )
    trace = []
    for index in range(steps):
        real, noise = recipe.batch(index, device)
        ones, zeros = torch.ones(len(real), 1, device=device), torch.zeros(len(real), 1, device=device)

        with torch.autocast(device, torch.float16):
            fake = generator(noise)
            logits = discriminator(torch.cat([real, fake.detach()]))
            d_loss = recipe.criterion(logits, torch.cat([ones, zeros]))
        d_row = d_loop.take(d_loss)

        with torch.autocast(device, torch.float16):
            g_loss = recipe.criterion(discriminator(fake), ones)
        trace.append(row_of(g_loop.take(g_loss), d_row))
    return [values(generator), values(discriminator)], trace
