"""Compile time and memory of a training step: flat storage against a tensor a parameter, and against the eager loop.

Compile time: first calls in a process of their own with an empty cache, 12 blocks; and again with the cache that the
first one left, as a second start of the same program. Memory: bytes a parameter, counted
tensor by tensor, and measured: what torch's allocator has handed out at the peak of a step, over what it had at the
step's start, added to the tensors that lived then (gradients of the step before, freed at once, left out).

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
    "whole step, not donated": lambda size: whole.funcamp_step(
        size, "cpu", torch.bfloat16, compiled=True, donate=False
    ),
    "eager": lambda size: whole.torch_step(size, "cpu", torch.bfloat16, compiled=False),
}


def peak_of(run: Callable[[], Any]) -> int:
    """The most bytes that torch's allocator handed out in a call, over those at its start."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    live = highest = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            highest = max(highest, live)
    return highest


def child(what: str, variant: str, size: str) -> float:
    """One measurement, in this process: seconds of the first call, or bytes that a step adds at its peak."""
    run = STEPS[variant](size)
    start = time.perf_counter()
    run()
    if what == "compile":
        return time.perf_counter() - start
    run()
    return peak_of(run)


def spawn(*arguments: str, times: int = 1) -> list[float]:
    """The measurement, so many times, each in a fresh process; with a compile cache that is empty at the first."""
    command = [sys.executable, __file__, "--child", *arguments]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        outs = [
            subprocess.run(command, env=environment, check=True, capture_output=True, text=True) for _ in range(times)
        ]
    return [float(out.stdout.split()[-1]) for out in outs]


def counted() -> tuple[dict[str, dict[str, float]], int]:
    """Bytes a parameter, tensor by tensor, of the state and of a step's gradients; the number of parameters."""

    def size(tree: Any) -> float:
        leaves = [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        return round(sum(leaf.nbytes for leaf in leaves) / count, 2)

    model, x, y = whole.build("38 M", "cpu")
    count = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = whole.cross_entropy(model(x), y)
    torch.amp.GradScaler("cpu").scale(loss).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    eager = {
        "parameters": size(list(model.parameters())),
        "moments": size([list(state.values()) for state in optimizer.state.values()]),
        "copies": 0.0,
        "gradients": size([p.grad for p in model.parameters()]),
    }
    step = funcamp.make_train_step(
        funcamp.module_loss(model, whole.cross_entropy), funcamp.stateless(torch.optim.AdamW), policy="bfloat16"
    )
    state = step.init()
    flat = {
        "parameters": size(state.params),
        "moments": size(state.opt_state),
        "copies": size(state.copies),
        "gradients": size(step._gradients(state, state.buffers, (x, y), 1)[0]),
    }
    return {"eager": eager, "funcamp, flat": flat}, count


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(child(*args.child))
        return
    first = {name: [round(s, 1) for s in spawn("compile", name, "12 blocks", times=2)] for name in list(STEPS)[:3]}
    held, count = counted()
    peaks = {}
    for name in ("eager", "whole step, flat", "whole step, not donated"):
        before = held["eager" if name == "eager" else "funcamp, flat"]
        start = sum(value for what, value in before.items() if what != "gradients")
        added = spawn("memory", name, "38 M")[0] / count
        peaks[name] = {"held": round(start, 2), "added": round(added, 2), "peak": round(start + added, 2)}
    today = datetime.date.today().isoformat()
    lines = [
        "# Compile time and memory of a training step",
        "",
        f"- date: {today}",
        "- command: python benchmarks/footprint.py",
        f"- device: {whole.device_name('cpu')}",
        f"- torch {torch.__version__}, Python {platform.python_version()}",
        "",
        "| first call, 12 blocks of width 64 | seconds, cold | seconds, compiled artifacts kept |",
        "|---|---|---|",
        *(f"| {name} | {cold} | {warm} |" for name, (cold, warm) in first.items()),
        "",
        "| bytes a parameter, 38 M parameters, AdamW | parameters | moments | copies | gradients | all |",
        "|---|---|---|---|---|---|",
        *(f"| {name} | {' | '.join(map(str, v.values()))} | {sum(v.values()):.2f} |" for name, v in held.items()),
        "",
        "| bytes a parameter at the peak of a step, batch 64 | held before, without gradients | added | peak |",
        "|---|---|---|---|",
        *(f"| {name} | {' | '.join(map(str, v.values()))} |" for name, v in peaks.items()),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        stem = args.out / f"{today}-footprint-cpu"
        stem.with_suffix(".md").write_text(text)
        numbers = {"first_call_s": first, "bytes_a_parameter": held, "peak_bytes_a_parameter": peaks}
        stem.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
