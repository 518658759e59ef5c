"""What do `step` and `update` of a scaler cost around an optimizer: torch's host read, a fused kernel, selection?

The gradients are there already; one iteration is scaler.step(optimizer) and scaler.update(). Variants are interleaved;
medians and quartiles of the rounds. On a GPU the clock stops when the device is done, and the host's own time, until
the calls have returned, is beside it: a scaler that reads the host cannot return before the device. `captured` replays
the same two calls from one CUDA graph.

    python benchmarks/grad_scaler.py [--device cuda] [--rounds 9] [--out benchmarks/results]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from _timing import about, arguments, interleaved, table, torch_variant, write
from _variants import captured

import funcamp

SIZES = {"0.1 M in 20": (20, 5_000, 200), "10 M in 100": (100, 100_000, 20), "40 M in 300": (300, 133_333, 6)}

Variant = tuple[Callable[[str], Any], dict[str, Any]]
VARIANTS: dict[str, Variant] = {
    "torch, AdamW": (lambda device: torch.amp.GradScaler(device), {"capturable": True}),
    "torch, fused AdamW": (lambda device: torch.amp.GradScaler(device), {"fused": True}),
    'funcamp skip="host", AdamW': (lambda device: funcamp.GradScaler(device, skip="host"), {"capturable": True}),
    'funcamp skip="select", AdamW': (lambda device: funcamp.GradScaler(device, skip="select"), {"capturable": True}),
    "funcamp, fused AdamW": (lambda device: funcamp.GradScaler(device), {"fused": True}),
}
CAPTURED = ('funcamp skip="select", AdamW', "funcamp, fused AdamW")


def iteration(variant: str, size: str, device: str) -> Callable[[], None]:
    """One `step` and `update`, its state warm."""
    count, elements, _ = SIZES[size]
    make, options = VARIANTS[variant]
    if device == "cpu":
        options = {name: value for name, value in options.items() if name != "capturable"}  # it is for accelerators
    params = [torch.nn.Parameter(torch.randn(elements, device=device)) for _ in range(count)]
    optimizer = torch.optim.AdamW(params, lr=1e-4, **options)
    scaler = make(device)
    scaler.scale(torch.zeros((), device=device))
    for param in params:
        param.grad = torch.randn_like(param) * 2.0**-8

    def run() -> None:
        scaler.step(optimizer)
        scaler.update()

    for _ in range(3):
        run()
    return run


def main() -> None:
    """Measure, print, and write the result files where asked."""
    args = arguments(__doc__).parse_args()
    rows, numbers = [], []
    for size, (_, _, repeats) in SIZES.items():
        runs = {name: iteration(name, size, args.device) for name in VARIANTS}
        if args.device == "cuda":
            runs |= {f"{name}, captured": captured(iteration(name, size, args.device)) for name in CAPTURED}
        timings = interleaved({n: torch_variant(run, args.device) for n, run in runs.items()}, repeats, args.rounds)
        base = timings["torch, fused AdamW"].quartiles[1]
        for name, timing in timings.items():
            low, middle, high = timing.quartiles
            numbers.append({"size": size, "variant": name, "ms": timing.quartiles, "host_ms": timing.host})
            over = f"{middle / base:.2f}"
            rows.append((size, name, f"{middle:.3f}", f"{low:.3f} to {high:.3f}", f"{timing.host:.3f}", over))
    columns = ("parameters in tensors", "variant", "median ms", "quartiles ms", "host ms", "over torch, fused")
    facts = about(args.device, rounds=args.rounds)
    write(args.out, f"grad-scaler-{args.device}", "The scaler's step and update", facts, table(columns, rows), numbers)


if __name__ == "__main__":
    main()
