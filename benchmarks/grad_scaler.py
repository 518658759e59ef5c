"""What do `step` and `update` of a scaler cost around an optimizer: torch's host read, a fused kernel, selection?

The gradients are there already; one iteration is scaler.step(optimizer) and scaler.update(). Variants are interleaved;
medians and quartiles of the rounds. On a GPU the clock stops when the device is done, and the host's own time, until
the calls have returned, is beside it: a scaler that reads the host cannot return before the device. `captured` replays
the same two calls from one CUDA graph.

    python benchmarks/grad_scaler.py [--device cuda] [--rounds 9] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import step as whole
import torch

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


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """The iteration in one CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def milliseconds(run: Callable[[], None], times: int, device: str) -> tuple[float, float]:
    """An iteration's time, and the host's part of it."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        run()
    host = time.perf_counter() - start
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / times * 1e3, host / times * 1e3


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="folder for a dated .md and .json")
    args = parser.parse_args()
    device, rows, results = whole.device_name(args.device), [], []
    for size, (_, _, times) in SIZES.items():
        runs = {name: iteration(name, size, args.device) for name in VARIANTS}
        if args.device == "cuda":
            runs |= {f"{name}, captured": captured(iteration(name, size, args.device)) for name in CAPTURED}
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for _ in range(args.rounds + 1):
            for name, run in runs.items():
                taken[name].append(milliseconds(run, times, args.device))
        base = statistics.median(total for total, _ in taken["torch, fused AdamW"][1:])
        for name, pairs in taken.items():
            low, middle, high = statistics.quantiles([total for total, _ in pairs[1:]], n=4)
            host = statistics.median(part for _, part in pairs[1:])
            results.append({"size": size, "variant": name, "ms": [low, middle, high], "host_ms": host})
            rows.append(
                f"| {size} | {name} | {middle:.3f} | {low:.3f} to {high:.3f} | {host:.3f} | {middle / base:.2f} |"
            )
    today = datetime.date.today().isoformat()
    lines = [
        "# The scaler's step and update",
        "",
        f"- date: {today}",
        f"- command: python benchmarks/grad_scaler.py --device {args.device} --rounds {args.rounds}",
        f"- device: {device}; torch {torch.__version__}, Python {platform.python_version()}",
        "",
        "| parameters in tensors | variant | median ms | quartiles ms | host ms | over torch, fused |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        stem = args.out / f"{today}-grad-scaler-{args.device}"
        stem.with_suffix(".md").write_text(text)
        stem.with_suffix(".json").write_text(json.dumps({"device": device, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
