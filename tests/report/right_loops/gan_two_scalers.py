"""A GAN with a scaler for each player, and five steps of the critic for one of the generator."""

import torch

from tests.report.loops.parts import batches, model_and_optimizer, scaler_of

generator, generator_optimizer = model_and_optimizer()
critic = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
critic_optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
critic_scaler, generator_scaler = scaler_of(), scaler_of()
for number, (x, y) in enumerate(batches(10)):
    critic_optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        fake = generator(x)
        loss = critic(fake.detach()).mean() - critic(y).mean()
    critic_scaler.scale(loss).backward()
    critic_scaler.step(critic_optimizer)
    critic_scaler.update()
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.clamp_(-0.5, 0.5)
    if number % 5 == 4:
        generator_optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = -critic(fake).mean()
        generator_scaler.scale(loss).backward()
        generator_scaler.step(generator_optimizer)
        generator_scaler.update()
