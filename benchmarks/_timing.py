"""Timing variants side by side, and the files that results go to."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import funcamp


class Variant(NamedTuple):
    """One way to do the work."""

    call: Callable[[], Any]
    wait: Callable[[], None]
    """Returns when the device has done what was called."""


class Timing(NamedTuple):
    """Milliseconds a call."""

    quartiles: tuple[float, float, float]
    ratio: float
    """The median over the rounds of this variant's time over the first variant's in the same round."""
    host: float
    """Until the call has returned, whatever the device still does."""


def in_fresh_processes(script: str, arguments: list[str], times: int) -> list[Any]:
    """The JSON that a benchmark prints last, so many times; at the first nothing is compiled yet, headers neither."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TMPDIR": cache}
        command = [sys.executable, script, *arguments]
        outs = [
            subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            for _ in range(times)
        ]
    return [json.loads(out.stdout.splitlines()[-1]) for out in outs]


def nothing() -> None:
    """What to wait for on a CPU."""


def torch_variant(call: Callable[[], Any], device: str) -> Variant:
    """A variant that runs on torch's current device."""
    return Variant(call, torch.cuda.synchronize if device == "cuda" else nothing)


def seconds(variant: Variant, repeats: int) -> tuple[float, float]:
    """Of so many calls: in all, and until they had returned."""
    variant.wait()
    start = time.perf_counter()
    for _ in range(repeats):
        variant.call()
    host = time.perf_counter() - start
    variant.wait()
    return time.perf_counter() - start, host


def interleaved(variants: dict[str, Variant], repeats: int, rounds: int) -> dict[str, Timing]:
    """Every round times each variant once, in a new order: what ran before leaves caches and memory behind.

    A first round is thrown away.
    """
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    turns = random.Random(0)
    for _ in range(rounds + 1):
        for name in turns.sample(list(variants), len(variants)):
            taken[name].append(seconds(variants[name], repeats))
    base = [total for total, _ in next(iter(taken.values()))[1:]]
    timings = {}
    for name, pairs in taken.items():
        totals = [total for total, _ in pairs[1:]]
        low, middle, high = (value / repeats * 1e3 for value in statistics.quantiles(totals, n=4))
        ratio = statistics.median(total / first for total, first in zip(totals, base))
        host = statistics.median(host for _, host in pairs[1:]) / repeats * 1e3
        timings[name] = Timing((low, middle, high), ratio, host)
    return timings


def device_name(device: str) -> str:
    """The processor and how much of it is used."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"CPU, {torch.get_num_threads()} threads, {found[0] if found else platform.processor()}"


def kilobytes(name: str) -> int:
    """What Linux says of this process: VmRSS is resident now, VmHWM the most that was, of this program alone.

    Not getrusage's ru_maxrss, which a child process begins with its parent's.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def arguments(doc: str | None, rounds: int = 9) -> argparse.ArgumentParser:
    """What every script takes."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--out", type=Path, help="folder for a dated .md and .json")
    return parser


def about(device: str, **more: Any) -> dict[str, str]:
    """Where and how a result came to be."""
    found = {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "device": device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "funcamp": funcamp.__version__,
    }
    return found | {name: str(value) for name, value in more.items()}


def table(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> list[str]:
    """Lines of Markdown."""
    columns = list(columns)
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return lines + [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]


def write(out: Path | None, name: str, title: str, facts: dict[str, str], body: list[str], numbers: Any) -> Path | None:
    """Print a result, and write it to dated files where a folder is given; the path without a suffix."""
    text = "\n".join([f"# {title}", "", *(f"- {key}: {value}" for key, value in facts.items()), "", *body]) + "\n"
    print(text)
    if out is None:
        return None
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"{facts['date']}-{name}"
    stem.with_suffix(".md").write_text(text)
    stem.with_suffix(".json").write_text(json.dumps({"about": facts, "results": numbers}, indent=1) + "\n")
    return stem
