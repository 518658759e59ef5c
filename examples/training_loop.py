"""The loop around a step, in the order in which one writes it.

    python examples/training_loop.py               a few minutes on a CPU; writes demo-out/training_loop
    python examples/training_loop.py --steps 40    stop in the middle of an epoch
    python examples/training_loop.py --resume      continue there, bit for bit

A small GPT learns lines of Python code, byte by byte, and then, with adapters (LoRA), lines of prose. Lines differ in
length, so micro-batches have different numbers of tokens. Both texts are in Python's own library.
"""

from __future__ import annotations

import argparse
import inspect
import math
import pydoc_data.topics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _gpt import GPT
from torch import Tensor, nn
from torch.utils.data import DataLoader

import funcamp

LENGTH, BATCH, ACCUMULATE, WORKERS = 32, 16, 4, 2
EPOCHS, UNFREEZE, PATIENCE, WIDTH, LAYERS, LR = 8, 1, 2, 32, 2, 1e-2
IGNORED = -100  # a label that does not count

# 1. Data: lines of different lengths, loaded by worker processes.


def load_lines() -> dict[str, list[bytes]]:
    """Return lines of code for training and evaluation, and lines of prose."""
    texts = inspect.getsource(inspect), "\n".join(pydoc_data.topics.topics.values())
    code, prose = ([line[: LENGTH + 1] for line in text.encode().splitlines() if len(line) > 1] for text in texts)
    return {"train": code[:837], "test": code[837:1000], "prose": prose[:500]}


def collate(lines: list[bytes]) -> tuple[Tensor, Tensor]:
    """Return bytes and next bytes of shape (micro-batches, BATCH, LENGTH); what is missing at the end is ignored."""
    parts = math.ceil(len(lines) / BATCH)
    inputs = torch.zeros(parts * BATCH, LENGTH, dtype=torch.int64)
    labels = torch.full_like(inputs, IGNORED)
    for row, line in enumerate(lines):
        values = torch.tensor(list(line))
        inputs[row, : len(line) - 1], labels[row, : len(line) - 1] = values[:-1], values[1:]
    return inputs.view(parts, BATCH, LENGTH), labels.view(parts, BATCH, LENGTH)


def batches(lines: list[bytes], epoch: int, first: int = 0, workers: int = WORKERS) -> DataLoader[Any]:
    """Return an epoch's batches, from the first that is wanted on; their order follows from the epoch."""
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(epoch)).tolist()
    rows = ACCUMULATE * BATCH
    return DataLoader(
        lines,  # type: ignore[arg-type]
        batch_sampler=[order[start : start + rows] for start in range(first * rows, len(order), rows)],
        collate_fn=collate,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        # By default a loader draws a seed from dropout's generator, and a resumed epoch would draw once more.
        generator=torch.Generator(),
    )


def to_device(batch: tuple[Tensor, Tensor], device: str) -> tuple[Tensor, ...]:
    return tuple(leaf.to(device, non_blocking=True) for leaf in batch)


# 2. The step: rates and decay by name, accumulation by tokens, an average of the weights.


def make_model(device: str) -> Any:
    torch.manual_seed(0)
    model: Any = GPT(LENGTH, WIDTH, LAYERS, heads=2)
    model.blocks.append(nn.Dropout(0.1))
    return model.to(device)


def criterion(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over the tokens of a micro-batch."""
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def tokens(batch: Any) -> Tensor:
    """Return how much a micro-batch counts."""
    count: Tensor = (batch[1] != IGNORED).sum()
    return count


def group(name: str, _: Tensor) -> str:
    """Return a parameter's group: its depth, and whether it decays."""
    parts = name.split(".")
    depth = int(parts[1]) + 1 if parts[0] == "blocks" else LAYERS + 1 if parts[0] in ("norm", "head") else 0
    return f"{depth} {'plain' if depth == 0 or name.endswith('bias') or 'norm' in name else 'decay'}"


def learning_rate(depth: int, applied: Tensor) -> Tensor:
    """Return a layer's rate after so many applied steps: less for the first layers, a warm-up, then falling."""
    return LR * 0.7 ** (LAYERS + 1 - depth) * ((applied + 1) / 10).clamp(max=1) / (1 + applied / 200)


def make_step(model: nn.Module) -> Any:
    """Return a step of the parameters that are not frozen."""
    adamw = {
        f"{depth} {kind}": funcamp.stateless(torch.optim.AdamW, lr=partial(learning_rate, depth), weight_decay=decay)
        for depth in range(LAYERS + 2)
        for kind, decay in (("decay", 0.1), ("plain", 0.0))
    }
    return funcamp.make_train_step(
        funcamp.module_loss(model, criterion),
        funcamp.by_group(adamw, group=group),
        funcamp.ScalerConfig(init_scale=2.0**20),  # too high on purpose: the first steps are skipped
        policy="float16",
        max_norm=1.0,
        accumulate=ACCUMULATE,
        weight=tokens,
        ema_decay=0.9,
    )


def freeze(model: nn.Module, epoch: int) -> None:
    """Train only the head in the first epochs, then everything."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(epoch >= UNFREEZE or name.startswith("head"))


# 3. The loop: evaluation of the average, early stopping, a checkpoint at any step.


def evaluate(step: funcamp.TrainStep, state: funcamp.TrainState, lines: list[bytes], device: str) -> float:
    """Return the mean loss of a token, with the average of the weights."""
    averaged, total, count = state._replace(params=state.ema), 0.0, 0
    for batch in batches(lines, epoch=0, workers=0):
        inputs, labels = (leaf.flatten(0, 1) for leaf in to_device(batch, device))
        number = int(tokens((inputs, labels)))
        total, count = total + number * step.loss(averaged, (inputs, labels)).item(), count + number
    return total / count


def train(model: Any, lines: dict[str, list[bytes]], steps: int, resume: bool, out: Path, wrap: Any) -> Any:
    """Train up to a step, or until the loss on other lines has not fallen for a while; return each epoch's row."""
    device = next(model.parameters()).device.type
    saved = funcamp.load(out / "last.pt") if resume else {}
    now = saved.get("now", {"epoch": 0, "batch": 0, "step": 0, "rows": [], "best": math.inf, "waited": 0})
    freeze(model, now["epoch"])
    step = make_step(model)
    run, state = wrap(step), step.init(flat=False)  # each parameter has its own count: most are trained later
    if resume:
        state = step.load_state_dict(saved["state"], like=state)
        torch.set_rng_state(saved["random"])  # for dropout
        torch.cuda.set_rng_state_all(saved["cuda"])
    while now["epoch"] < EPOCHS and now["waited"] < PATIENCE:
        if now["epoch"] == UNFREEZE:  # a new step, with the values, moments and scale of the old one
            model.load_state_dict(step.loss_fn.state_dict(state.params, state.buffers))
            freeze(model, UNFREEZE)
            new = make_step(model)
            fresh = new.init(flat=False)
            state = new.load_state_dict(new.state_dict(fresh) | step.state_dict(state), like=fresh)
            step, run = new, wrap(new)
        for batch in batches(lines["train"], now["epoch"], now["batch"]):
            state, _ = run(state, to_device(batch, device))
            now |= {"batch": now["batch"] + 1, "step": now["step"] + 1}
            if now["step"] == steps:
                random = {"random": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
                funcamp.save({"state": step.state_dict(state), "now": now} | random, out / "last.pt")
                return now["rows"]
        row = {"epoch": now["epoch"], "loss": evaluate(step, state, lines["test"], device)}
        row |= {"skipped": state.skipped.item(), "scale": state.scaler.scale.item()}
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items()))
        now |= {"epoch": now["epoch"] + 1, "batch": 0, "rows": [*now["rows"], row], "waited": now["waited"] + 1}
        if row["loss"] < now["best"]:
            now |= {"best": row["loss"], "waited": 0}
            funcamp.save(step.loss_fn.state_dict(state.ema, state.buffers), out / "best.pt")
    model.load_state_dict(funcamp.load(out / "best.pt"))
    return now["rows"]


# 4. Another task: adapters on the trained model, which is frozen and shared.


class LoRA(nn.Module):
    """A linear layer as it is, plus a product of two small matrices, which are trained."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, device=base.weight.device)
        self.up = nn.Linear(rank, base.out_features, bias=False, device=base.weight.device)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


def adapt(model: Any, lines: list[bytes], wrap: Any) -> tuple[dict[str, Tensor], list[float]]:
    """Add adapters to every linear layer of the blocks and train them; return them and the losses."""
    device = next(model.parameters()).device.type
    model.requires_grad_(False)
    for name, layer in list(model.blocks.named_modules()):
        if isinstance(layer, nn.Linear):
            model.blocks.set_submodule(name, LoRA(layer))
    adamw, loss_fn = funcamp.stateless(torch.optim.AdamW, lr=LR), funcamp.module_loss(model, criterion)
    step = funcamp.make_train_step(loss_fn, adamw, policy="float16", accumulate=ACCUMULATE, weight=tokens)
    run, state = wrap(step), step.init()  # only the adapters: the rest stays where it is, in the model
    losses = []
    for epoch in range(EPOCHS):
        for batch in batches(lines, epoch):
            state, metrics = run(state, to_device(batch, device))
            losses.append(metrics.loss)
    return state.params.state_dict(), torch.stack(losses).tolist()


def main(
    steps: int = 0, resume: bool = False, out: Path = Path("demo-out/training_loop"), wrap: Any = funcamp.jit
) -> Any:
    out.mkdir(parents=True, exist_ok=True)
    model, lines = make_model("cuda" if torch.cuda.is_available() else "cpu"), load_lines()
    rows = train(model, lines, steps, resume, out, wrap)
    if not steps:
        adapters, losses = adapt(model, lines["prose"], wrap)
        print(f"adapters: loss {losses[0]:.4g}, then {losses[-1]:.4g}")
        funcamp.save(adapters, out / "adapters.pt")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=0, help="stop after this step; 0: at the end")
    parser.add_argument("--resume", action="store_true")
    main(**vars(parser.parse_args()))
