"""Look inside the demo's GPT: which numbers fit float16, before, during and after training.

    python examples/numerics_gpt.py                  half a minute

Every step is a plain step; one in twenty is a tracked one, on the same state.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from _gpt import GPT, batch_at, load_bytes
from train_gpt import cross_entropy, make_schedule

import funcamp
from funcamp import numerics

EVERY = 20


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train a little, and return the two reports and the records in between."""
    parser = argparse.ArgumentParser("numerics_gpt", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    text, _ = load_bytes()
    model = GPT(64, args.width, 2, 4)
    loss_fn = funcamp.module_loss(model, cross_entropy)
    adamw = funcamp.stateless(torch.optim.AdamW, lr=make_schedule(3e-3, args.steps))
    config = funcamp.ScalerConfig(2.0**12, growth_interval=50)
    step, look = (
        funcamp.make_train_step(loss, adamw, config, policy="float16", max_norm=1.0)
        for loss in (loss_fn, numerics.track_scales(loss_fn))
    )

    def batch(number: int) -> Any:
        return batch_at(text, number, 0, 8, 64, "cpu")

    state, history = step.init(), []
    before = numerics.numerics_report(step, state, batch(0), module=model)
    for number in range(args.steps):
        state, metrics = (step if number % EVERY else look)(state, batch(number))
        if metrics.records:
            # as without loss scaling; with it almost nothing is flushed
            unscaled = {name: record.unscale(metrics.scale) for name, record in metrics.records.items()}
            history.append((number, unscaled))
    after = numerics.numerics_report(step, state, batch(args.steps), module=model)
    print("\n".join([*after.summary(), "", after.annotate(), ""]))
    for number, records in history:
        flushed = {name: record.backward.total().underflow(torch.float16).item() for name, record in records.items()}
        layer = max(flushed, key=lambda name: flushed[name])
        print(f"step {number}: float16 flushes {100 * flushed[layer]:.3g} % of the gradient of {layer} without a scale")
    return {"before": before, "after": after, "history": history}


if __name__ == "__main__":
    main()
