"""A GAN with one scaler and one update, and two losses of the discriminator."""

import torch
from torch.nn.functional import mse_loss

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

generator, generator_optimizer = model_and_optimizer()
discriminator = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
discriminator_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
scaler = scaler_of()


def judge(outputs: torch.Tensor, label: float) -> torch.Tensor:
    return mse_loss(discriminator(outputs).float(), torch.full((3, 1), label))


for x, y in batches():
    discriminator.zero_grad()
    with torch.autocast("cpu", torch.float16):
        real_loss = judge(y, 1.0)
    scaler.scale(real_loss).backward()
    with torch.autocast("cpu", torch.float16):
        fake = generator(x)
        fake_loss = judge(fake.detach(), 0.0)
    scaler.scale(fake_loss).backward()
    scaler.step(discriminator_optimizer)
    generator.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = judge(fake, 1.0)
    scaler.scale(loss).backward()
    scaler.step(generator_optimizer)
    scaler.update()

for x, y in batches():
    discriminator.zero_grad()
    with torch.autocast("cpu", torch.float16):
        fake = generator(x).detach()
    for outputs, label in ((y, 1.0), (fake, 0.0)):
        with torch.autocast("cpu", torch.float16):
            loss = judge(outputs, label)
        scaler.scale(loss).backward()
    scaler.step(discriminator_optimizer)
    scaler.update()
