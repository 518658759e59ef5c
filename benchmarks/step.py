"""What does a whole training step cost, against what people would use instead?

A residual MLP, a CNN with BatchNorm and a GPT, three sizes each; AdamW; autocast to bfloat16 on a CPU and to float16 on
a GPU, or to --dtype. The variants run interleaved in one process: each round times each of them once, in a new order.
Reported: the median over the rounds, the quartiles, the ratio to torch's eager loop within each round, the host's part,
and the first call, with its compilation, apart. JAX (jitted with donation, optax, jmp's rule) has a failed row where it
is absent.

    python benchmarks/step.py [--device cuda] [--dtype bfloat16] [--rounds 9] [--sizes "MLP 3.2 M;..."] [--forms]
        [--alone] [--variants "funcamp.jit;..."] [--public] [--warm] [--out DIR]

--public takes models of transformers and timm instead, with torch's loops and `funcamp.jit`. On a CPU first calls are
those of further processes, one with an empty compile cache and one with what it left, and so is the peak of memory.
--alone gives every variant a process of its own, as it has in training: what else lives in one changes what malloc
gives back to the system, and with it the time of a step. The processes take turns, each variant has three.
--forms adds funcamp's own options. On a CPU glibc hands every block above 32 MB back to the system when it is freed,
and the next step of a torch loop faults its pages in again; with --keep-memory malloc keeps what it has, for all
variants alike.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from _models import CPU_SIZES, GPU_SIZES, Size
from _public import PACKAGES, PACKAGES_ON_A_GPU, PUBLIC_GPU_SIZES, PUBLIC_SIZES
from _timing import (
    Report,
    Row,
    Variant,
    about,
    arguments,
    chosen,
    in_fresh_processes,
    kilobytes,
    measured,
    named,
    seconds,
    torch_variant,
)
from _variants import FORMS, OURS, OURS_ON_A_GPU, PEERS, PEERS_ON_A_GPU, Maker

from funcamp._types import name_of

KEEP = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296"
PROCESSES = 3
KNOWN = CPU_SIZES | PUBLIC_SIZES


def jax_variant(size: Size, device: str, dtype: torch.dtype) -> Variant:
    """JAX's step."""
    import _jax_peer

    return Variant(*_jax_peer.step(size, device, dtype))


def variants(device: str, *, forms: bool) -> dict[str, Any]:
    """Makers of variants by name, torch's eager loop first."""
    on_a_gpu = device == "cuda"
    makers: dict[str, Maker] = {**PEERS}
    if on_a_gpu:
        makers |= PEERS_ON_A_GPU
    makers |= OURS
    if on_a_gpu:
        makers |= OURS_ON_A_GPU
    if forms:
        makers |= FORMS

    def make(maker: Maker, size: Size, dtype: torch.dtype) -> Variant:
        return torch_variant(maker(size, device, dtype), device)

    found: dict[str, Any] = {name: functools.partial(make, maker) for name, maker in makers.items()}
    found["JAX jit, optax, jmp's rule"] = lambda size, dtype: jax_variant(size, device, dtype)
    if not on_a_gpu:
        found["JAX jit, optax, jmp's rule, float32"] = lambda size, _: jax_variant(size, device, torch.float32)
    return found


def measure(
    name: str, size: Size, device: str, dtype: torch.dtype, rounds: int, makers: dict[str, Any]
) -> Iterator[Row]:
    """One row a variant."""
    made = {label: functools.partial(make, size, dtype) for label, make in makers.items()}
    for row in measured(name, made, size.steps, rounds, device):
        if "median_ms" in row:
            row["items_per_s"] = round(size.items / row["median_ms"] * 1e3)
        yield row


def alone(name: str, device: str, rounds: int, labels: list[str], flags: list[str]) -> list[Row]:
    """As `measure`, each variant in processes of its own, in turns."""
    found: dict[str, list[Row]] = {label: [] for label in labels}
    turns = random.Random(0)
    for _ in range(PROCESSES):
        for label in turns.sample(labels, len(labels)):
            command = [sys.executable, __file__, f"--device={device}", f"--rounds={rounds}", "--sizes", name, *flags]
            run = subprocess.run([*command, "--child", label], stdout=subprocess.PIPE, text=True)
            row = {"failed": "process"} if run.returncode else json.loads(run.stdout.splitlines()[-1])
            if "failed" in row:
                print(f"{name}: {label}: failed: {row['failed']}", file=sys.stderr)
            else:
                found[label].append(row)
    base = statistics.median(row["median_ms"] for row in found[labels[0]])
    rows: list[Row] = []
    for label, rows_of_processes in found.items():
        if not rows_of_processes:
            rows.append({"size": name, "variant": label, "failed": "process"})
            continue
        by_time = sorted(rows_of_processes, key=lambda row: row["median_ms"])
        middle = by_time[len(by_time) // 2]
        spread = [by_time[0]["median_ms"], by_time[-1]["median_ms"]]
        rows.append({**middle, "quartiles_ms": spread, "ratio": round(middle["median_ms"] / base, 3)})
    return rows


def child(name: str, label: str, device: str, dtype: torch.dtype, rounds: int, makers: dict[str, Any]) -> None:
    """One variant, in this process: its row as JSON."""
    known = GPU_SIZES if device == "cuda" else CPU_SIZES
    (row,) = measure(name, known[name], device, dtype, rounds, {label: makers[label]})
    print(json.dumps(row))


def start(name: str, label: str, dtype: torch.dtype, makers: dict[str, Any]) -> None:
    """The first steps of one variant, in this process: seconds of the first call and the most resident MB, as JSON."""
    variant = makers[label](KNOWN[name], dtype)
    first, _ = seconds(variant, 1)
    seconds(variant, 3)
    print(json.dumps({"first_call_s": round(first, 2), "peak_mb": round(kilobytes("VmHWM") / 1024)}))


def public(name: str, dtype: torch.dtype, rounds: int, makers: dict[str, Any]) -> Iterator[Row]:
    """As `measure` on a CPU, with the first calls and the memory of further processes."""
    flags = ["--public", f"--dtype={name_of(dtype)}", "--sizes", name]
    for row in measure(name, KNOWN[name], "cpu", dtype, rounds, makers):
        if "failed" not in row:
            starts = in_fresh_processes(__file__, [*flags, "--start", row["variant"]], times=2)
            for when, found in zip(("cold", "warm"), starts):
                row |= {f"{what}_{when}": value for what, value in found.items()}
            del row["first_call_s"]
        yield row


def parser_of_step() -> argparse.ArgumentParser:
    """The options of this script; --child and --start are for the processes that it starts."""
    parser = arguments(__doc__)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), help="float16 on a GPU, else bfloat16")
    parser.add_argument("--alone", action="store_true", help="every variant in processes of its own")
    # Not --only: Inductor takes what follows that for a name, and writes it into its code.
    parser.add_argument("--variants", help="names of variants beside the eager one, separated by semicolons")
    parser.add_argument("--child", help="one variant, for --alone")
    parser.add_argument("--public", action="store_true", help="models of transformers and timm")
    parser.add_argument("--start", help="one variant's first steps, for --public")
    parser.add_argument("--warm", action="store_true", help="keep the compile cache of the environment")
    parser.add_argument("--forms", action="store_true", help="funcamp's own options too")
    parser.add_argument("--keep-memory", action="store_true", help="let malloc keep freed blocks of any size")
    return parser


def chosen_sizes(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Size]:
    """The models to measure, by name."""
    if not args.public:
        return chosen(parser, args, GPU_SIZES if args.device == "cuda" else CPU_SIZES)
    packages = PACKAGES_ON_A_GPU if args.device == "cuda" else PACKAGES
    if not all(map(importlib.util.find_spec, packages)):
        parser.error(f"--public needs {', '.join(packages)}: pip install -c constraints.txt -e '.[models]'")
    return chosen(parser, args, PUBLIC_GPU_SIZES if args.device == "cuda" else PUBLIC_SIZES)


def chosen_variants(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Any]:
    """Makers of the variants to measure, by name; the eager loop is always the first."""
    makers = variants(args.device, forms=args.forms)
    if args.public and args.device == "cpu":
        makers = {name: makers[name] for name in (*PEERS, "funcamp.jit")}
    if not args.variants:
        return makers
    wanted = named(parser, "--variants", args.variants, variants("cpu", forms=True) | variants("cuda", forms=True))
    eager = next(iter(makers))
    return {name: make for name, make in makers.items() if name in (eager, *wanted)}


def report_of_public_models(args: argparse.Namespace) -> Report:
    """An empty table for --public on a CPU."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    columns = {
        "model": "size",
        "variant": "variant",
        "median ms": "median_ms",
        "quartiles ms": "quartiles_ms",
        "time over eager": "ratio",
        "first call s, cold": "first_call_s_cold",
        "s, compiled artifacts kept": "first_call_s_warm",
        "peak RSS MB, cold": "peak_mb_cold",
        "MB, compiled artifacts kept": "peak_mb_warm",
    }
    facts = about(args.device, **versions, rounds=args.rounds)
    return Report(args.out, "step-public-cpu", "A whole training step of public models", facts, columns)


def report_of_steps(args: argparse.Namespace) -> Report:
    """An empty table for the models of these benchmarks, and for --public on a GPU."""
    columns = {
        "model": "size",
        "variant": "variant",
        "median ms": "median_ms",
        "fastest to slowest process" if args.alone else "quartiles ms": "quartiles_ms",
        "time over eager": "ratio",
        "host ms": "host_ms",
        "tokens, rows or images a second": "items_per_s",
        "first call s, compiled artifacts kept" if args.warm else "first call s": "first_call_s",
    }
    if args.device == "cuda":
        columns["peak MB"] = "peak_mb"
    jax = importlib.util.find_spec("jax") and importlib.metadata.version("jax")
    malloc = KEEP if args.keep_memory else "as the system has it"
    facts = about(args.device, jax=jax or "not installed", rounds=args.rounds, malloc=malloc)
    suffixes = {
        "-public": args.public,
        f"-{args.dtype}": args.dtype,
        "-alone": args.alone,
        "-forms": args.forms,
        "-kept": args.keep_memory,
    }
    suffix = "".join(name for name, given in suffixes.items() if given)
    return Report(args.out, f"step-{args.device}{suffix}", "A whole training step", facts, columns)


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = parser_of_step()
    args = parser.parse_args()
    if args.keep_memory and os.environ.get("GLIBC_TUNABLES") != KEEP:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "GLIBC_TUNABLES": KEEP})
    if not args.child and not args.start and not args.warm:
        cold = tempfile.TemporaryDirectory()  # so that the first call shows the whole compilation
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cold.name
    sizes = chosen_sizes(parser, args)
    makers = chosen_variants(parser, args)
    dtype = getattr(torch, args.dtype or ("float16" if args.device == "cuda" else "bfloat16"))
    if args.child:
        child(next(iter(sizes)), args.child, args.device, dtype, args.rounds, makers)
        return
    if args.start:
        start(next(iter(sizes)), args.start, dtype, makers)
        return
    in_processes = args.public and args.device == "cpu"
    report = report_of_public_models(args) if in_processes else report_of_steps(args)
    for name, size in sizes.items():
        if in_processes:
            report.add(public(name, dtype, args.rounds, makers))
        elif args.alone:
            flags = [f"--dtype={name_of(dtype)}", *(["--forms"] * args.forms)]
            report.add(alone(name, args.device, args.rounds, list(makers), flags))
        else:
            report.add(measure(name, size, args.device, dtype, args.rounds, makers))


if __name__ == "__main__":
    main()
