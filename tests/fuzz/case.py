"""A random training, as a short script that compares it along all roads; and how to cut it down."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.fuzz.blocks import BLOCKS

CRITERIA = {
    "mse": "lambda out, y: F.mse_loss(out.float(), y)",
    "l1": "lambda out, y: F.smooth_l1_loss(out.float(), y)",
    "classes": "lambda out, y: F.cross_entropy(out.float(), y.argmax(-1))",
    "low precision": "lambda out, y: (out - y.to(out.dtype)).square().mean()",
    "penalty": "lambda out, y: F.mse_loss(out.float(), y) + 1e-2 * sum(p.square().sum() for p in model.parameters())",
    "masked": "lambda out, y: ((out.float() - y) * (y > 0)).square().sum() / (y > 0).sum().clamp(min=1)",
}
OPTIMIZERS = (
    "SGD, lr=0.1",
    "SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01",
    "SGD, lr=lambda count: 0.1 / (1 + count), momentum=0.9",
    "Adam, lr=1e-2",
    "AdamW, lr=1e-2, weight_decay=0.1",
    "AdamW, lr=torch.tensor(1e-2), amsgrad=True",
    "RMSprop, lr=1e-3, momentum=0.5, centered=True",
    "Adagrad, lr=1e-2",
    "NAdam, lr=1e-2",
    "RAdam, lr=1e-2",
    "Adadelta, lr=0.5",
    "Adamax, lr=1e-2",
    "Rprop, lr=1e-2",
    "ASGD, lr=1e-2",
)
OPTIONS = (
    "max_norm=0.5",
    "max_value=0.01",
    "ema_decay=0.9",
    "accumulate=2",
    "accumulate=2, weight=lambda batch: batch[0].shape[0] + 1.0",
    'observe={"largest": lambda grads: max_of(grads)}',
)
#: What is done to the state or with the step before a step is taken; nothing of it may change a number.
OPERATIONS = (
    "save and load",
    "clone",
    "evaluate",
    "pickle",
    "eager step",
    "other jit",
    "forget the state's flag",
    "compute_params",
)
BY_SHAPE = """funcamp.by_group({{
    "matrix": funcamp.stateless(torch.optim.{0}),
    "vector": funcamp.stateless(torch.optim.{0}),
}})"""
SCRIPT = """import torch
from torch import nn
from torch.nn import functional as F

import funcamp
from tests.fuzz import blocks
from tests.fuzz.roads import compare, made_batches, max_of

torch.manual_seed({seed})
model = nn.Sequential(
    nn.Linear(6, 8),
{blocks}    nn.Linear(8, 3),
)
criterion = {criterion}
loss_fn = funcamp.module_loss(model, criterion, keep_buffers={keep_buffers})
optimizer = {optimizer}
config = funcamp.ScalerConfig(init_scale=2.0**{power}, growth_interval={interval})
step = funcamp.make_train_step(loss_fn, optimizer, config, policy={policy!r}{options})
compare(
    step,
    made_batches({sizes}{micro}),
    operations={operations},
    flat={flat},
    consume={consume},
    **BACKEND,
)
"""


@dataclass(frozen=True)
class Case:
    """The choices of a seed."""

    seed: int
    blocks: tuple[str, ...]
    criterion: str
    optimizer: str
    grouped: bool
    policy: str | None
    options: tuple[str, ...]
    keep_buffers: bool
    power: int
    interval: int
    sizes: tuple[int, ...]
    operations: tuple[tuple[int, str], ...]
    flat: bool
    consume: bool

    def script(self) -> str:
        """Return the script that runs it; `BACKEND` is a dict of `jit`'s options."""
        made = BY_SHAPE.format(self.optimizer) if self.grouped else f"funcamp.stateless(torch.optim.{self.optimizer})"
        return SCRIPT.format(
            seed=self.seed,
            blocks="".join(f"    {block},\n" for block in self.blocks),
            criterion=CRITERIA[self.criterion],
            keep_buffers=self.keep_buffers,
            optimizer=made,
            power=self.power,
            interval=self.interval,
            policy=self.policy,
            options="".join(f", {option}" for option in self.options),
            sizes=list(self.sizes),
            micro=", micro=2" if any("accumulate" in option for option in self.options) else "",
            operations=dict(self.operations),
            flat=self.flat,
            consume=self.consume,
        )


def case_of(seed: int) -> Case:
    """Return the case of a seed."""
    draw = random.Random(seed)
    blocks = tuple(draw.choice(BLOCKS) for _ in range(draw.randint(1, 5)))
    steps = draw.randint(4, 7)
    usual = draw.choice((5, 8))
    sizes = tuple(usual if draw.random() < 0.8 else 3 for _ in range(steps))
    options: list[str] = []
    for option in draw.sample(OPTIONS, draw.choice((0, 0, 1, 1, 2, 3))):
        clashes = "accumulate" if option.startswith("accumulate") else "max_"
        if not (option.startswith(("accumulate", "max_")) and any(clashes in other for other in options)):
            options.append(option)
    return Case(
        seed=seed,
        blocks=blocks,
        criterion=draw.choice(list(CRITERIA)),
        optimizer=draw.choice(OPTIMIZERS),
        grouped=draw.random() < 0.2,
        policy=draw.choice((None, "float16", "float16", "bfloat16")),
        options=tuple(options),
        keep_buffers=draw.random() < 0.5,
        power=draw.choice((4, 10, 16)),
        interval=draw.choice((1, 2, 2000)),
        sizes=sizes,
        operations=tuple((number, draw.choice(OPERATIONS)) for number in range(1, steps) if draw.random() < 0.4),
        flat=draw.random() < 0.7,
        consume=draw.random() < 0.2,
    )


def smaller(case: Case) -> Iterator[Case]:
    """Yield cases with one thing less."""
    for name in ("blocks", "options", "operations"):
        parts = getattr(case, name)
        for index in range(len(parts)):
            yield replace(case, **{name: parts[:index] + parts[index + 1 :]})
    if len(case.sizes) > 3:
        kept = tuple(one for one in case.operations if one[0] < len(case.sizes) - 1)
        yield replace(case, sizes=case.sizes[:-1], operations=kept)
    if len(set(case.sizes)) > 1:
        yield replace(case, sizes=(case.sizes[0],) * len(case.sizes))
    simple: dict[str, Any] = {
        "consume": False,
        "grouped": False,
        "flat": True,
        "keep_buffers": False,
        "policy": None,
        "criterion": "mse",
        "optimizer": OPTIMIZERS[0],
        "interval": 2000,
    }
    for name, value in simple.items():
        if getattr(case, name) != value:
            yield replace(case, **{name: value})
