"""A few steps of small models, for compute-sanitizer: `-m tests.cuda.short_run captured|called [DEVICE]`.

Prints the scales; the steps that overflow are among them.
"""

from __future__ import annotations

import sys

import torch
import torch._inductor.config

from funcamp import GradScaler, ScalerConfig, jit, stateless
from tests.support.helpers import to
from tests.support.models import Task, cnn, mlp, tied
from tests.support.steps import build

STEPS = 4


def by_step(task: Task, device: str, *, capture: bool) -> list[float]:
    task.model.to(device)
    adamw, config = stateless(torch.optim.AdamW, lr=1e-2), ScalerConfig(init_scale=2.0**19, growth_interval=3)
    step = build(task, adamw, config=config, policy="float16", max_norm=1.0, ema_decay=0.9)
    run, state, scales = jit(step, capture=capture), step.init(), []
    for index in range(STEPS):
        state, metrics = run(state, to(task.batch(index), device))
        scales.append(metrics.scale.item())
    return scales


def by_class(task: Task, device: str) -> list[float]:
    model, scaler, scales = task.model.to(device), GradScaler(device, init_scale=2.0**19), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for index in range(STEPS):
        x, y = to(task.batch(index), device)
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            loss = task.criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def main(form: str, device: str = "cuda") -> None:
    torch._inductor.config.triton.autotune_pointwise = False  # each try would be checked too
    for make in (mlp, cnn, tied):
        sys.stdout.write(f"{make.__name__}: {by_step(make(), device, capture=form == 'captured')}\n")
    sys.stdout.write(f"GradScaler: {by_class(mlp(), device)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
