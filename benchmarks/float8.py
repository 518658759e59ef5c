"""Does a GPT whose linear layers multiply in float8 learn as it does in bfloat16, also after it was poisoned?

A small GPT on the bytes of the standard library, several seeds; the loss is the mean of the last 50 steps. "poisoned"
has a loss that is infinite at two steps, and 2^30 times too large at a third: that step is clipped and taken. It shows
that numbers are right, not speed: a CPU emulates float8 products.

    python benchmarks/float8.py [--steps 600] [--seeds 5] [--out benchmarks/results]
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from _timing import Report, about, arguments
from torch import Tensor

from funcamp import ScalerConfig, float8, make_train_step, module_loss, presets, stateless

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import _gpt

CONTEXT = 32
BATCH = 8
BY_ROW = float8.Float8Config("row", power_of_two=True)
CONFIGS = {
    "bfloat16": None,
    "float8": float8.Float8Config(),
    "float8, per row": BY_ROW,
    "poisoned": float8.Float8Config(),
}


def poison(step: int, steps: int) -> float:
    """The factor of the loss at a step of the poisoned run."""
    return {steps // 4: float("inf"), steps // 3: 2.0**30, steps // 2: float("inf")}.get(step, 1.0)


def criterion(out: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """The cross-entropy times a factor."""
    tokens, factor = target
    return torch.nn.functional.cross_entropy(out.float().flatten(0, 1), tokens.flatten()) * factor


def run(variant: str, seed: int, steps: int, text: Tensor) -> dict[str, Any]:
    """The losses of a run."""
    torch.manual_seed(seed)
    model = _gpt.GPT(layers=2, width=32, heads=2, context=CONTEXT)
    in_float8 = CONFIGS[variant]
    if in_float8 is not None:
        float8.convert(model, in_float8)
    adamw = stateless(torch.optim.AdamW, lr=2e-3)
    config: ScalerConfig = presets.disabled()
    step = make_train_step(module_loss(model, criterion), adamw, config, policy="bfloat16", max_norm=1.0)
    state = step.init()
    losses = []
    for number in range(steps):
        x, y = _gpt.batch_at(text, number, seed, BATCH, CONTEXT, "cpu")
        factor = poison(number, steps) if variant == "poisoned" else 1.0
        state, metrics = step(state, (x, (y, torch.tensor(factor))))
        if factor < float("inf"):
            losses.append(metrics.loss.item() / factor)
    return {"losses": losses, "last": statistics.mean(losses[-50:]), "skipped": int(state.skipped)}


def main() -> None:
    """Train, print, and write the result files where asked."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = about("cpu", steps=args.steps, model=f"GPT, 2 layers of width 32, batches of {BATCH} x {CONTEXT} bytes")
    columns = {"seed": "size", "products": "variant", "loss": "loss", "over bfloat16": "ratio", "skipped": "skipped"}
    report = Report(args.out, "float8-cpu", "A GPT in float8", facts, columns)
    text, _ = _gpt.load_bytes(1_000_000)
    for seed in range(args.seeds):
        base = 0.0
        for variant in CONFIGS:
            found = run(variant, seed, args.steps, text)
            base = base or found["last"]
            row = {"size": str(seed), "variant": variant, "skipped": found["skipped"]}
            row |= {"loss": round(found["last"], 4), "ratio": round(found["last"] / base, 4)}
            report.add([{**row, "losses": [round(loss, 4) for loss in found["losses"][::10]]}])


if __name__ == "__main__":
    main()
