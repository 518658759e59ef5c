"""A float16 run works for 75 steps, then its loss is NaN. Find out why with funcamp.numerics, and fix it.

    python examples/tutorials/numerics.py                   a few seconds

A small attention model reads windows of a price series and predicts whether buyers or sellers lead. Prices rise over
the years, and the windows come in that order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import funcamp
from funcamp import numerics

STEPS, DAYS, FEATURES, WIDTH, EVERY = 120, 12, 8, 32, 20


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Return 32 windows of one month: all numbers of a month are multiples of its price level."""
    rng = torch.Generator().manual_seed(number)
    pattern = torch.randn(32, DAYS, FEATURES, generator=rng)
    level = 1.06**number
    return level * pattern, (pattern[:, :, 0].sum(1) > 0).long()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        weights = (q @ k.transpose(1, 2)).softmax(-1)
        return self.out(weights @ v)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.embed, self.attention = norm, nn.Linear(FEATURES, WIDTH), Attention()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(self.norm(x))
        return self.head((x + self.attention(x)).mean(1))  # type: ignore[no-any-return]


def train(norm: nn.Module) -> dict[str, Any]:
    """Train in float16; look at every twentieth step, and take the first step with a loss that is not finite apart."""
    torch.manual_seed(0)
    model = Model(norm)
    loss_fn = funcamp.module_loss(model, nn.functional.cross_entropy)
    adamw = funcamp.stateless(torch.optim.AdamW, lr=3e-3)
    config = funcamp.ScalerConfig(init_scale=2.0**10)
    step, look = (
        funcamp.make_train_step(loss, adamw, config, policy="float16", max_norm=1.0)
        for loss in (loss_fn, numerics.track_scales(loss_fn))  # the same step, with a tap behind every layer
    )
    state, losses, history, report, bad = step.init(), [], [], None, None
    for number in range(STEPS):
        before = state
        state, metrics = (step if number % EVERY else look)(state, batch(number))
        losses.append(metrics.loss.item())
        if metrics.records:
            history.append((number, {name: one.forward.amax.item() for name, one in metrics.records.items()}))
        if bad is None and not metrics.loss.isfinite():
            bad = number
            report = numerics.numerics_report(step, before, batch(number), module=model)
    report = report or numerics.numerics_report(step, state, batch(STEPS), module=model)
    return {"losses": losses, "bad": bad, "history": history, "report": report, "metrics": metrics}


def main() -> dict[str, Any]:
    """Train, find the cause, fix it, train again; return what was found."""
    run = train(nn.Identity())
    print(f"first loss that is not finite: step {run['bad']}; skipped {run['metrics'].skipped.item()}")
    print("largest activation of each layer:")
    for number, largest in run["history"]:
        print(f"  step {number:3d}", *(f"{name} {value:.3g}" for name, value in largest.items()), sep="  ")
    print(*run["report"].summary(), sep="\n")
    cause = run["report"].cause()

    fixed = train(nn.LayerNorm(FEATURES))
    print(f"fixed: loss {fixed['losses'][-1]:.3f}, skipped {fixed['metrics'].skipped.item()}")
    print(*fixed["report"].summary(), sep="\n")
    return {
        "bad": run["bad"],
        "skipped": int(run["metrics"].skipped),
        "scale": run["metrics"].scale.item(),
        "operation": cause.operation.name,
        "module": cause.operation.path,
        "line": cause.operation.line[1],
        "fixed_bad": fixed["bad"],
        "fixed_skipped": int(fixed["metrics"].skipped),
        "fixed_loss": sum(fixed["losses"][-10:]) / 10,
        "recommended": fixed["report"].recommend_scale().scale,
    }


if __name__ == "__main__":
    print(main())
