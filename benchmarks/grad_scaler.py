"""What do `step` and `update` of a scaler cost around an optimizer: torch's host read, a fused kernel, selection?

The gradients are there already; one iteration is scaler.step(optimizer) and scaler.update(). Variants are interleaved;
medians and quartiles of the rounds. On a GPU the clock stops when the device is done, and the host's own time, until
the calls have returned, is beside it: a scaler that reads the host cannot return before the device. `captured` replays
the same two calls from one CUDA graph.

    python benchmarks/grad_scaler.py [--device cuda] [--rounds 9] [--sizes "10 M in 100;..."] [--out DIR]
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from _timing import Report, Variant, about, arguments, chosen, measured, torch_variant
from _variants import captured

import funcamp

SIZES = {"0.1 M in 20": (20, 5_000, 200), "10 M in 100": (100, 100_000, 20), "40 M in 300": (300, 133_333, 6)}

VARIANTS: dict[str, tuple[Callable[[str], Any], dict[str, Any]]] = {
    "torch, fused AdamW": (lambda device: torch.amp.GradScaler(device), {"fused": True}),
    "torch, AdamW": (lambda device: torch.amp.GradScaler(device), {"capturable": True}),
    'funcamp skip="host", AdamW': (lambda device: funcamp.GradScaler(device, skip="host"), {"capturable": True}),
    'funcamp skip="select", AdamW': (lambda device: funcamp.GradScaler(device, skip="select"), {"capturable": True}),
    "funcamp, fused AdamW": (lambda device: funcamp.GradScaler(device), {"fused": True, "capturable": True}),
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
    parser = arguments(__doc__)
    args = parser.parse_args()
    columns = {
        "parameters in tensors": "size",
        "variant": "variant",
        "median ms": "median_ms",
        "quartiles ms": "quartiles_ms",
        "host ms": "host_ms",
        "over torch, fused": "ratio",
    }
    facts = about(args.device, rounds=args.rounds)
    report = Report(args.out, f"grad-scaler-{args.device}", "The scaler's step and update", facts, columns)

    def made(name: str, size: str, graph: bool = False) -> Variant:
        run = iteration(name, size, args.device)
        return torch_variant(captured(run) if graph else run, args.device)

    for size, (_, _, repeats) in chosen(parser, args, SIZES).items():
        makers = {name: functools.partial(made, name, size) for name in VARIANTS}
        if args.device == "cuda":
            makers |= {f"{name}, captured": functools.partial(made, name, size, graph=True) for name in CAPTURED}
        report.add(measured(size, makers, repeats, args.rounds, args.device))


if __name__ == "__main__":
    main()
