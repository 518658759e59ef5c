"""What does it cost a compiled step to count what every layer holds, forward and backward?

The same step with and without `numerics.track_scales`, interleaved in one process; every element counted, and a sample
of each tensor. Reported: the time over the plain step's within each round, and how many numbers a step counts.

    python benchmarks/track.py [--device cuda] [--rounds 9] [--sizes "GPT 3.3 M;..."] [--out DIR]
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from _models import CPU_SIZES, GPU_SIZES, Size, build, cross_entropy
from _timing import Variant, about, arguments, interleaved, seconds, table, torch_variant, write

import funcamp
from funcamp import numerics

NEVER = 10**6
KINDS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "tracked, every element": {"sample": None},
    "tracked, 4,096 of each tensor": {"sample": 4096},
}


def variant(size: Size, device: str, dtype: torch.dtype, kind: dict[str, Any] | None) -> tuple[Variant, Any]:
    """A step, and the metrics of a first call."""
    model, x, y = build(size, device)
    loss_fn = funcamp.module_loss(model, cross_entropy)
    if kind is not None:
        loss_fn = numerics.track_scales(loss_fn, **kind)
    config = funcamp.ScalerConfig(growth_interval=NEVER)
    adamw = funcamp.stateless(torch.optim.AdamW, lr=1e-4)
    step = funcamp.make_train_step(loss_fn, adamw, config, policy=str(dtype)[6:])
    run, held = funcamp.jit(step), [step.init()]

    def call() -> Any:
        held[0], metrics = run(held[0], (x, y))
        return metrics

    return torch_variant(call, device), call()


def measure(name: str, size: Size, device: str, rounds: int) -> list[dict[str, Any]]:
    """One row a variant."""
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    made = {label: variant(size, device, dtype, kind) for label, kind in KINDS.items()}
    for one, _ in made.values():
        seconds(one, 2)
    timings = interleaved({label: one for label, (one, _) in made.items()}, size.steps, rounds)
    counted = {
        label: int(sum((r.forward.count + r.backward.count).item() for r in metrics.records.values()))
        for label, (_, metrics) in made.items()
    }
    torch._dynamo.reset()
    gc.collect()
    return [
        {
            "size": name,
            "variant": label,
            "median_ms": round(timing.quartiles[1], 3),
            "quartiles_ms": [round(timing.quartiles[0], 3), round(timing.quartiles[2], 3)],
            "ratio_to_plain": round(timing.ratio, 3),
            "counted": counted[label],
        }
        for label, timing in timings.items()
    ]


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = arguments(__doc__)
    parser.add_argument("--sizes", help="names, separated by semicolons")
    args = parser.parse_args()
    known = GPU_SIZES if args.device == "cuda" else CPU_SIZES
    default = [name for name in known if "MLP" in name or "GPT" in name]
    rows: list[dict[str, Any]] = []
    for name in args.sizes.split(";") if args.sizes else default:
        rows += measure(name, known[name], args.device, args.rounds)
    cells = [
        (
            *(row["size"], row["variant"], row["median_ms"], " to ".join(map(str, row["quartiles_ms"]))),
            *(row["ratio_to_plain"], row["counted"]),
        )
        for row in rows
    ]
    columns = ("model", "variant", "median ms", "quartiles ms", "time over plain", "numbers counted")
    facts = about(args.device, rounds=args.rounds)
    write(args.out, f"track-{args.device}", "Counting what every layer holds", facts, table(columns, cells), rows)


if __name__ == "__main__":
    main()
