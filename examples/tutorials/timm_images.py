"""Train an image model of timm: validation, checkpoints, resume, and a learning rate that changes during the run.

    python examples/tutorials/timm_images.py                a minute; writes timm_images.pt after every epoch
    python examples/tutorials/timm_images.py --epochs 3     stop after 3 of the 6 epochs
    python examples/tutorials/timm_images.py --resume       continue after the last complete epoch

The images are drawn here: a disc, a square, a cross or a ring, somewhere, in noise. Put your data loader in place of
`images`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import funcamp

EPOCHS, STEPS, BATCH, SIZE, LR, DROP = 6, 25, 32, 32, 3e-3, 4
POLICY = "bfloat16"  # on a GPU without bfloat16: "float16", nothing else changes


def images(seed: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """Return a batch (size, 3, 32, 32) and its labels."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (size,), generator=rng)
    radius, left, top = (
        low + wide * torch.rand(size, 1, 1, generator=rng) for low, wide in ((5, 4), (10, 12), (10, 12))
    )
    x, y = (torch.arange(SIZE) - left).abs(), (torch.arange(SIZE)[:, None] - top).abs()
    disc, hole = x**2 + y**2 < radius**2, x**2 + y**2 < (0.6 * radius) ** 2
    square, cross = torch.maximum(x, y) < 0.9 * radius, (torch.minimum(x, y) < 2) & (torch.maximum(x, y) < radius)
    shapes = torch.stack([disc, square, cross, disc & ~hole])[labels, torch.arange(size)]
    color = torch.rand(size, 3, 1, 1, generator=rng) + 0.5
    return shapes[:, None] * color + 0.5 * torch.randn(size, 3, SIZE, SIZE, generator=rng), labels


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("resnet10t", channels=(16, 32, 64, 128), num_classes=4, drop_rate=0.1)
    return model.train()


def main(
    epochs: int = EPOCHS, file: Path = Path("timm_images.pt"), resume: bool = False, wrap: Any = funcamp.jit
) -> list[dict[str, float]]:
    """Train up to this epoch, and return what every epoch that ran here reports. The tests give another `wrap`."""
    model = make_model()
    loss_fn = funcamp.module_loss(model, nn.functional.cross_entropy)
    lr = torch.tensor(LR)  # a tensor: the compiled step reads it at every call
    adamw = funcamp.stateless(torch.optim.AdamW, lr=lr, weight_decay=0.05)
    step = funcamp.make_train_step(loss_fn, adamw, policy=POLICY, max_norm=1.0, ema_decay=0.95)
    run = wrap(step)

    state, first = step.init(), 0
    if resume:
        saved = funcamp.load(file)
        state = step.load_state_dict(saved["state"], like=state)
        torch.set_rng_state(saved["rng"])  # for dropout
        first = saved["epochs"]

    history = []
    for epoch in range(first, epochs):
        lr.fill_(LR if epoch < DROP else LR / 10)
        for number in range(STEPS):
            state, metrics = run(state, images(epoch * STEPS + number))
        history.append({"epoch": epoch, "lr": metrics.lr.item()} | validate(step, state))
        print("  ".join(f"{name} {value:.4g}" for name, value in history[-1].items()))
        funcamp.save({"state": step.state_dict(state), "rng": torch.get_rng_state(), "epochs": epoch + 1}, file)
    return history


def validate(step: funcamp.TrainStep, state: funcamp.TrainState) -> dict[str, float]:
    """Return the loss, and the accuracy of the parameters and of their average (EMA), on images of other seeds."""
    batches = [images(1_000_000 + number, size=64) for number in range(4)]
    found = {"loss": torch.stack([step.loss(state, one) for one in batches]).mean().item()}
    for name, average in {"accuracy": False, "accuracy_ema": True}.items():
        with step.evaluating(state, average=average) as model:
            right = [model(x).argmax(1) == labels for x, labels in batches]
        found[name] = torch.cat(right).float().mean().item()
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--resume", action="store_true")
    main(**vars(parser.parse_args()))
