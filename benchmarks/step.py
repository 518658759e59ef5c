"""What does a whole training step cost, against the eager torch.amp.GradScaler?

A residual MLP (LayerNorm, two Linears a block), AdamW, autocast to bfloat16 on a CPU and float16 on a GPU. The variants
run interleaved in one process: every round times each of them once, in turn. Reported: the median over the rounds, the
spread (first to third quartile), the ratio to the eager loop within each round, and the first call apart.

    python benchmarks/step.py [--device cuda] [--rounds 9] [--keep-memory] [--out benchmarks/results]

On a CPU glibc hands every block above 32 MB back to the system when it is freed, and the next step faults its pages in
again: a flat gradient of 38 M parameters is such a block, the eager loop's many small ones are not. With --keep-memory
malloc keeps what it has, for all variants alike.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import funcamp

SIZES = {"0.14 M": (4, 64, 32), "3.2 M": (6, 256, 64), "38 M": (8, 768, 64)}  # blocks, width, batch
KEEP = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296"
STEPS = {"0.14 M": 60, "3.2 M": 20, "38 M": 4}  # in one timing


class Block(nn.Module):
    """x + W2 gelu(W1 norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, width) to the same."""
        hidden: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + hidden


def build(size: str, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A fresh model with fixed weights, and one batch."""
    blocks, width, batch = SIZES[size]
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(blocks)), nn.Linear(width, 16)).to(device)
    return model, torch.randn(batch, width, device=device), torch.randint(16, (batch,), device=device)


def torch_step(size: str, device: str, dtype: torch.dtype, *, compiled: bool) -> Callable[[], None]:
    """torch's documented loop: autocast, GradScaler, fused AdamW; the model compiled or not."""
    model, x, y = build(size, device)
    forward = torch.compile(model) if compiled else model
    scaler = torch.amp.GradScaler(device, growth_interval=10**6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype):
            loss = nn.functional.cross_entropy(forward(x).float(), y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()

    return step


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """In float32."""
    return nn.functional.cross_entropy(logits.float(), target)


def funcamp_step(
    size: str, device: str, dtype: torch.dtype, *, compiled: bool, flat: bool = True, **options: Any
) -> Callable[[], None]:
    """The same step as a pure function: eager, or by `funcamp.jit` with these options."""
    model, x, y = build(size, device)
    loss_fn = funcamp.module_loss(model, cross_entropy)
    config = funcamp.ScalerConfig(growth_interval=10**6)
    optimizer = funcamp.stateless(torch.optim.AdamW, lr=1e-4)
    policy = str(dtype).removeprefix("torch.")
    step = funcamp.make_train_step(loss_fn, optimizer, config, policy=policy, flat=flat)
    run: Callable[..., Any] = funcamp.jit(step, **options) if compiled else step
    state = [step.init()]

    def call() -> None:
        state[0], _ = run(state[0], (x, y))

    return call


def loop_step(size: str, device: str, dtype: torch.dtype, *, compiled: bool, captured: bool) -> Callable[[], None]:
    """The loop of `torch_step` with funcamp.GradScaler: compiled whole, captured into one CUDA graph, or both."""
    model, x, y = build(size, device)
    scaler = funcamp.GradScaler(device, growth_interval=10**6)
    options: dict[str, Any] = {} if compiled else {"fused": True}
    if device == "cuda" and compiled:
        options = {"capturable": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **options)

    def step() -> Tensor:
        model.zero_grad()
        with torch.autocast(device, dtype, cache_enabled=not captured):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    run: Callable[[], Any] = torch.compile(step, fullgraph=True) if compiled else step

    def traced() -> None:
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            run()

    if not captured:
        return traced
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            traced()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        traced()
    return graph.replay


VARIANTS: dict[str, Callable[..., Callable[[], None]]] = {
    "eager torch.amp.GradScaler, fused AdamW": functools.partial(torch_step, compiled=False),
    "torch.compile(model), torch.amp.GradScaler, fused AdamW": functools.partial(torch_step, compiled=True),
    "funcamp.GradScaler, the loop compiled whole": functools.partial(loop_step, compiled=True, captured=False),
    "funcamp, eager": functools.partial(funcamp_step, compiled=False),
    "funcamp.jit, a tensor a parameter": functools.partial(funcamp_step, compiled=True, flat=False),
    "funcamp.jit, donate=False": functools.partial(funcamp_step, compiled=True, donate=False),
    "funcamp.jit": functools.partial(funcamp_step, compiled=True),
    "funcamp.jit, exact=True": functools.partial(funcamp_step, compiled=True, exact=True),
}
ON_A_GPU = {
    "funcamp.jit, capture=False": functools.partial(funcamp_step, compiled=True, capture=False),
    "funcamp.GradScaler, fused AdamW, the loop captured": functools.partial(loop_step, compiled=False, captured=True),
    "funcamp.GradScaler, the loop compiled and captured": functools.partial(loop_step, compiled=True, captured=True),
}


def device_name(device: str) -> str:
    """The processor and how much of it is used."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"CPU, {torch.get_num_threads()} threads, {found[0] if found else platform.processor()}"


def timed(step: Callable[[], None], repeats: int, device: str) -> float:
    """Milliseconds a step."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e3


def measure(size: str, device: str, rounds: int) -> list[dict[str, Any]]:
    """One row a variant."""
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    steps: dict[str, Callable[[], None]] = {}
    first: dict[str, float] = {}
    variants = VARIANTS | (ON_A_GPU if device == "cuda" else {})
    times: dict[str, list[float]] = {name: [] for name in variants}
    for name, make in variants.items():
        steps[name] = make(size, device, dtype)
        first[name] = timed(steps[name], 1, device) / 1e3
        timed(steps[name], 2, device)
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(timed(step, STEPS[size], device))
    base = times[next(iter(variants))]
    rows = []
    for name, values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        ratio = statistics.median(value / eager for value, eager in zip(values, base))
        rows.append(
            {
                "size": size,
                "variant": name,
                "first_call_s": round(first[name], 2),
                "median_ms": round(middle, 3),
                "quartiles_ms": [round(low, 3), round(high, 3)],
                "ratio_to_eager": round(ratio, 3),
            }
        )
    return rows


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", default=",".join(SIZES), help="of these, separated by commas")
    parser.add_argument("--out", type=Path, help="folder for a dated .md and .json")
    parser.add_argument("--keep-memory", action="store_true", help="let malloc keep freed blocks of any size")
    args = parser.parse_args()
    if args.keep_memory and os.environ.get("GLIBC_TUNABLES") != KEEP:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "GLIBC_TUNABLES": KEEP})
    cold = tempfile.TemporaryDirectory()  # so that the first call shows the whole compilation
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cold.name
    rows = [row for size in args.sizes.split(",") for row in measure(size, args.device, args.rounds)]
    about = {
        "date": datetime.date.today().isoformat(),
        "command": "python " + " ".join(["benchmarks/step.py", *sys.argv[1:]]),
        "device": device_name(args.device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "funcamp": funcamp.__version__,
        "rounds": args.rounds,
        "malloc": KEEP if args.keep_memory else "as the system has it",
    }
    lines = [
        "# A whole training step",
        "",
        *(f"- {key}: {value}" for key, value in about.items()),
        "",
        "| parameters | variant | median ms | quartiles ms | time over eager | first call s |",
        "|---|---|---|---|---|---|",
        *(
            f"| {r['size']} | {r['variant']} | {r['median_ms']} | {r['quartiles_ms'][0]} to {r['quartiles_ms'][1]} "
            f"| {r['ratio_to_eager']} | {r['first_call_s']} |"
            for r in rows
        ),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        kept = "-kept" if args.keep_memory else ""
        stem = args.out / f"{about['date']}-step-{args.device}{kept}"
        stem.with_suffix(".md").write_text(text)
        stem.with_suffix(".json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
