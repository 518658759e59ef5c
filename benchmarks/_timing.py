"""Timing variants side by side, and the files that results go to."""

from __future__ import annotations

import argparse
import datetime
import functools
import gc
import json
import operator
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

import funcamp

Size = TypeVar("Size")


class Variant(NamedTuple):
    """One way to do the work."""

    call: Callable[[], Any]
    wait: Callable[[], None]
    """Returns when the device has done what was called."""


def in_fresh_processes(script: str, arguments: list[str], times: int, limit: float | None = None) -> list[Any]:
    """The JSON that a benchmark prints last, so many times; at the first nothing is compiled yet, headers neither.

    limit: the seconds after which one is stopped by TimeoutExpired.
    """
    with tempfile.TemporaryDirectory() as cache:
        return [in_fresh_process(script, arguments, cache, limit) for _ in range(times)]


def in_fresh_process(script: str, arguments: list[str], cache: str, limit: float | None = None) -> Any:
    """The JSON that a benchmark prints last, in a process with this folder as cache."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TMPDIR": cache}
    command = [sys.executable, script, *arguments]
    out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=limit)
    return json.loads(out.stdout.splitlines()[-1])


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


Row: TypeAlias = dict[str, Any]
"""What was measured of a variant: "size", "variant", and numbers, or what it "failed" with."""


Bases: TypeAlias = Mapping[str, Mapping[str, str]]
"""By the name of a ratio and of a variant: the variant whose time it is divided by."""


def interleaved(variants: dict[str, Variant], repeats: int, rounds: int, bases: Bases | None = None) -> dict[str, Row]:
    """Every round times each variant once, in a new order: what ran before leaves caches and memory behind.

    A first round is thrown away. Milliseconds a call: the median over the rounds, the quartiles, the host's part (until
    the call has returned, whatever the device still does). Of a ratio the median and the quartiles within rounds, if
    its base is here; by default there is one, "ratio", to the first variant.
    """
    bases = bases or {"ratio": dict.fromkeys(variants, next(iter(variants)))}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    turns = random.Random(0)
    for _ in range(rounds + 1):
        for name in turns.sample(list(variants), len(variants)):
            taken[name].append(seconds(variants[name], repeats))
    totals: dict[str, list[float]] = {}
    hosts: dict[str, list[float]] = {}
    for name, pairs in taken.items():
        totals[name] = [total for total, _ in pairs[1:]]
        hosts[name] = [host for _, host in pairs[1:]]
    rows = {}
    for name in taken:
        low, middle, high = (round(value / repeats * 1e3, 4) for value in statistics.quantiles(totals[name], n=4))
        row: Row = {"median_ms": middle, "quartiles_ms": [low, high]}
        for ratio, base in bases.items():
            if base[name] in totals:
                ratios_of_rounds = list(map(operator.truediv, totals[name], totals[base[name]]))
                quartiles = [round(value, 3) for value in statistics.quantiles(ratios_of_rounds, n=4)]
                row[ratio] = quartiles[1]
                row[f"{ratio}_quartiles"] = quartiles[::2]
        row["host_ms"] = round(statistics.median(hosts[name]) / repeats * 1e3, 4)
        rows[name] = row
    return rows


def measured(
    size: str,
    makers: Mapping[str, Callable[[], Variant]],
    repeats: int,
    rounds: int,
    device: str,
    inspect: Callable[[Variant], Row] | None = None,
    bases: Bases | None = None,
    together: bool = False,
) -> Iterator[Row]:
    """Make, time and free variants; yield a row for each as soon as it is measured. One that fails is a row too.

    On a CPU all run interleaved. On a GPU each does so with the first one alone, which is made once, and is freed
    before the next: graphs keep their memory. There "peak_mb" is what the variant's first three calls allocate at most.

    Args:
        size: what is measured, by name.
        makers: what makes each variant.
        repeats: calls in one timing.
        rounds: timings.
        device: its type.
        inspect: more numbers of a variant that was timed.
        bases: what the variants are compared with, where it runs beside them; by default the first one.
        together: on a GPU too all run interleaved.
    """
    first, *others = makers
    bases = bases or {"ratio": dict.fromkeys(makers, first)}
    at_once = 1 if device == "cuda" and not together else max(len(others), 1)
    base = functools.cache(makers[first])
    done: set[str] = set()
    for start in range(0, max(len(others), 1), at_once):
        labels = [first, *others[start : start + at_once]]
        made: dict[str, Callable[[], Variant]] = {**{label: makers[label] for label in labels}, first: base}
        rows = _measured(size, made, repeats, rounds, device, inspect, bases)
        torch._dynamo.reset()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        yield from (row for row in rows if row["variant"] not in done)
        done |= set(labels)


def _measured(
    size: str,
    makers: Mapping[str, Callable[[], Variant]],
    repeats: int,
    rounds: int,
    device: str,
    inspect: Callable[[Variant], Row] | None,
    bases: Bases,
) -> list[Row]:
    """The rows of variants that are in memory at once."""
    running: dict[str, Variant] = {}
    rows: dict[str, Row] = {label: {"size": size, "variant": label} for label in makers}
    for label, make in makers.items():
        try:
            before = _allocated(device)
            variant = make()
            rows[label]["first_call_s"] = round(seconds(variant, 1)[0], 2)
            seconds(variant, 2)
            running[label] = variant
            if device == "cuda":
                rows[label]["peak_mb"] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
        except Exception as error:  # a peer that fails is a result
            rows[label]["failed"] = _print_failure(size, label, error)
    try:
        for label, times in interleaved(running, repeats, rounds, bases).items():
            rows[label] |= times
            if inspect:
                rows[label] |= inspect(running[label])
    except Exception as error:  # out of memory beside another, say
        for label in running:
            rows[label].setdefault("failed", _print_failure(size, label, error))
    return list(rows.values())


def _allocated(device: str) -> int:
    """Bytes that torch has on a GPU now, from where its peak is counted; 0 on a CPU."""
    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _print_failure(size: str, label: str, error: Exception) -> str:
    """Print what a variant failed with; return its kind, for the table."""
    print(f"{size}: {label}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
    return type(error).__name__


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
    parser.add_argument("--sizes", help="names, separated by semicolons")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=_rounds, default=rounds, help="2 or more: quartiles are of several")
    parser.add_argument("--out", type=Path, help="folder for a dated .md and .json")
    return parser


def check_on_cpu(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Report a --device that a script for the CPU does not have."""
    if args.device != "cpu":
        parser.error(f"--device must be cpu; got {args.device}")


def _rounds(given: str) -> int:
    if not given.isdecimal() or int(given) < 2:
        raise argparse.ArgumentTypeError(f"must be an int >= 2; got {given}")
    return int(given)


def named(parser: argparse.ArgumentParser, option: str, given: str | None, known: Iterable[str]) -> list[str]:
    """The names that an option gives, separated by semicolons; all that are known without it."""
    known = list(known)
    names = given.split(";") if given else known
    if strangers := [name for name in names if name not in known]:
        parser.error(f"{option} must name {'; '.join(known)}; got {'; '.join(strangers)}")
    return names


def chosen(parser: argparse.ArgumentParser, args: argparse.Namespace, known: dict[str, Size]) -> dict[str, Size]:
    """The sizes that --sizes names, in its order; all that are known without it."""
    return {name: known[name] for name in named(parser, "--sizes", args.sizes, known)}


def about(device: str, **more: Any) -> dict[str, str]:
    """Where and how a result came to be."""
    found = {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/" + shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
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


def head(title: str, facts: dict[str, str]) -> list[str]:
    """The lines that a result begins with."""
    return [f"# {title}", "", *(f"- {key}: {value}" for key, value in facts.items()), ""]


def write(out: Path | None, name: str, title: str, facts: dict[str, str], body: list[str], numbers: Any) -> Path | None:
    """Print a result, and `save` it."""
    print(*head(title, facts), *body, sep="\n")
    return save(out, name, title, facts, body, numbers)


def save(out: Path | None, name: str, title: str, facts: dict[str, str], body: list[str], numbers: Any) -> Path | None:
    """Write a result to dated files where a folder is given; the path without a suffix."""
    if out is None:
        return None
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"{facts['date']}-{name}"
    stem.with_suffix(".md").write_text("\n".join([*head(title, facts), *body]) + "\n")
    stem.with_suffix(".json").write_text(json.dumps({"about": facts, "results": numbers}, indent=1) + "\n")
    return stem


class Report:
    """A table that is written anew with every row: of a process that is killed it holds all that was measured."""

    def __init__(
        self,
        out: Path | None,
        name: str,
        title: str,
        facts: dict[str, str],
        columns: dict[str, str],
        summary: Callable[[list[Row]], list[str]] | None = None,
    ) -> None:
        """Begin an empty one.

        Args:
            out: a folder for dated files.
            name: how their names end.
            title: the heading.
            facts: from `about`.
            columns: the key of a row for each column.
            summary: what makes further lines of all rows, to be written after the table.
        """
        self.rows: list[Row] = []
        self.stem: Path | None = None
        self._out = out
        self._name = name
        self._title = title
        self._facts = facts
        self._columns = columns
        self._summary = summary
        print(*head(title, facts), *table(columns, []), sep="\n", flush=True)

    def add(self, rows: Iterable[Row]) -> None:
        """Print rows as they come, and write all."""
        for row in rows:
            self.rows.append(row)
            print(table(self._columns, [self._cells(row)])[-1], flush=True)
            lines = table(self._columns, map(self._cells, self.rows)) + self.summary()
            self.stem = save(self._out, self._name, self._title, self._facts, lines, self.rows)

    def summary(self) -> list[str]:
        """The lines after the table."""
        return ["", *self._summary(self.rows)] if self._summary else []

    def _cells(self, row: Row) -> list[str]:
        values = [row.get(key, "") for key in self._columns.values()]
        cells = [" to ".join(map(str, value)) if isinstance(value, list) else str(value) for value in values]
        return [*cells[:2], f"failed: {row['failed']}", *cells[3:]] if "failed" in row else cells
