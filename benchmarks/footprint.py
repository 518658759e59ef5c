"""Compile time and memory of a training step: flat storage against a tensor a parameter, and against the eager loop.

Compile time: first calls in a process of their own with an empty cache, 12 blocks. Memory: bytes a parameter, counted
tensor by tensor (what lives between steps), and what a step adds at its peak (high-water mark of the process over its
resting size, Linux only), in a process of its own.

    python benchmarks/footprint.py [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import step as whole
import torch
from torch.func import functional_call, grad
from torch.utils import _pytree

import funcamp

whole.SIZES["12 blocks"] = (12, 64, 32)


def forward_backward(size: str) -> Callable[[], Any]:
    """The model's loss and gradients alone, by torch.func, under autocast."""
    model, x, y = whole.build(size, "cpu")
    params = {name: value.detach() for name, value in model.named_parameters()}

    def loss_fn(params: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return whole.cross_entropy(functional_call(model, params, (x,)), y)

    run = torch.compile(grad(loss_fn), fullgraph=True)
    return lambda: run(params)


STEPS: dict[str, Callable[[str], Callable[[], Any]]] = {
    "forward and backward": forward_backward,
    "whole step, flat": lambda size: whole.funcamp_step(size, "cpu", torch.bfloat16, compiled=True),
    "whole step, a tensor a parameter": lambda size: whole.funcamp_step(
        size, "cpu", torch.bfloat16, compiled=True, flat=False
    ),
    "eager": lambda size: whole.torch_step(size, "cpu", torch.bfloat16, compiled=False),
}


def status(name: str) -> float:
    """A line of /proc/self/status in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def child(what: str, variant: str, size: str) -> float:
    """One measurement, in this process: seconds of the first call, or MB that a step adds at its peak."""
    run = STEPS[variant](size)
    start = time.perf_counter()
    run()
    if what == "compile":
        return time.perf_counter() - start
    added = []
    for _ in range(5):
        run()
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        resting = status("VmRSS")
        run()
        added.append(status("VmHWM") - resting)
    return sorted(added)[len(added) // 2]


def spawn(*arguments: str) -> float:
    """The measurement in a fresh process with an empty compile cache."""
    with tempfile.TemporaryDirectory() as cold:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cold}
        out = subprocess.run(
            [sys.executable, __file__, "--child", *arguments],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
    return float(out.stdout.split()[-1])


def persistent() -> dict[str, float]:
    """Bytes a parameter that live between steps, tensor by tensor."""
    model, _, _ = whole.build("38 M", "cpu")
    count = sum(p.numel() for p in model.parameters())
    step = funcamp.make_train_step(
        funcamp.module_loss(model, whole.cross_entropy), funcamp.stateless(torch.optim.AdamW), policy="bfloat16"
    )
    state = step.init()

    def size(tree: Any) -> float:
        return float(sum(leaf.nbytes for leaf in _pytree.tree_leaves(tree)) / count)

    return {
        "parameters": size(state.params),
        "moments": size(state.opt_state),
        "copies": size(state.copies),
    }


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(child(*args.child))
        return
    first = {name: round(spawn("compile", name, "12 blocks"), 1) for name in list(STEPS)[:3]}
    added = {name: round(spawn("memory", name, "38 M")) for name in ("eager", "whole step, flat")}
    held = {name: round(value, 2) for name, value in persistent().items()}
    today = datetime.date.today().isoformat()
    lines = [
        "# Compile time and memory of a training step",
        "",
        f"- date: {today}",
        "- command: python benchmarks/footprint.py",
        f"- device: CPU, {torch.get_num_threads()} threads",
        f"- torch {torch.__version__}, Python {platform.python_version()}",
        "",
        "| first call, 12 blocks of width 64 | seconds |",
        "|---|---|",
        *(f"| {name} | {seconds} |" for name, seconds in first.items()),
        "",
        "| lives between steps, 38 M parameters, AdamW | bytes a parameter |",
        "|---|---|",
        *(f"| funcamp, flat: {name} | {value} |" for name, value in held.items()),
        "| eager: parameters, moments | 4 + 8 |",
        "",
        "| a step adds at its peak, 38 M parameters, batch 64 | MB |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in added.items()),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        stem = args.out / f"{today}-footprint-cpu"
        stem.with_suffix(".md").write_text(text)
        numbers = {"first_call_s": first, "bytes_a_parameter": held, "peak_added_mb": added}
        stem.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
