"""A GAN with one scaler and one update. The losses of the discriminator are added by one line."""

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

generator, generator_optimizer = model_and_optimizer()
discriminator = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
scaler = scaler_of()


def loss_of(outputs: torch.Tensor, label: float) -> torch.Tensor:
    with torch.autocast("cpu", torch.float16):
        return mse_loss(discriminator(outputs).float(), torch.full((3, 1), label))


for x, y in batches():
    discriminator.zero_grad()
    with torch.autocast("cpu", torch.float16):
        fake = generator(x)
    for outputs, label in ((y, 1.0), (fake.detach(), 0.0)):
        loss = loss_of(outputs, label)
        scaler.scale(loss).backward()
    scaler.step(discriminator_optimizer)
    generator.zero_grad()
    loss = loss_of(fake, 1.0)
    scaler.scale(loss).backward()
    scaler.step(generator_optimizer)
    scaler.update()
