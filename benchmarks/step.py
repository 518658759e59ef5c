"""What does a whole training step cost, against what people would use instead?

A residual MLP, a CNN with BatchNorm and a GPT, three sizes each; AdamW; autocast to bfloat16 on a CPU and to float16 on
a GPU. The variants run interleaved in one process: each round times each of them once, in a new order. Reported: the
median over the rounds, the quartiles, the ratio to torch's eager loop within each round, the host's part, and the first
call, with its compilation, apart. JAX (jitted with donation, optax, jmp) takes part where it is installed.

    python benchmarks/step.py [--device cuda] [--rounds 9] [--sizes "MLP 3.2 M;..."] [--forms] [--alone]
        [--only "funcamp.jit;..."] [--public] [--out DIR]

--public takes models of transformers and timm instead, on a CPU, with torch's two loops and `funcamp.jit`; first calls
are those of further processes, one with an empty compile cache and one with what it left, and so is the peak of memory.
--alone gives every variant a process of its own, as it has in training: what else lives in one changes what malloc
gives back to the system, and with it the time of a step. The processes take turns, each variant has three.
--forms adds funcamp's own options. On a CPU glibc hands every block above 32 MB back to the system when it is freed,
and the next step faults its pages in again; with --keep-memory malloc keeps what it has, for all variants alike.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import torch
from _models import CPU_SIZES, GPU_SIZES, Size
from _plots import dots
from _public import PACKAGES, PUBLIC_SIZES
from _timing import (
    Variant,
    about,
    arguments,
    in_fresh_processes,
    interleaved,
    kilobytes,
    seconds,
    table,
    torch_variant,
    write,
)
from _variants import FORMS, OURS, OURS_ON_A_GPU, PEERS, PEERS_ON_A_GPU, Maker

KEEP = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296"
PROCESSES = 3
TOGETHER = 3  # variants beside the eager one at a time on a GPU, where each holds its graph's memory


KNOWN = CPU_SIZES | PUBLIC_SIZES


def jax_variant(size: Size, device: str, dtype: torch.dtype) -> Variant:
    """JAX's step."""
    import _jax_peer

    return Variant(*_jax_peer.step(size, device, dtype))


def variants(device: str, *, forms: bool) -> dict[str, Any]:
    """Makers of variants by name, torch's eager loop first."""
    makers: dict[str, Maker] = PEERS | (PEERS_ON_A_GPU if device == "cuda" else {}) | OURS
    makers |= (OURS_ON_A_GPU if device == "cuda" else {}) | (FORMS if forms else {})

    def make(maker: Maker, size: Size, dtype: torch.dtype) -> Variant:
        return torch_variant(maker(size, device, dtype), device)

    found: dict[str, Any] = {name: functools.partial(make, maker) for name, maker in makers.items()}
    if importlib.util.find_spec("jax") and importlib.util.find_spec("optax"):
        found["JAX jit, optax, jmp"] = lambda size, dtype: jax_variant(size, device, dtype)
        if device == "cpu":
            found["JAX jit, optax, jmp, float32"] = lambda size, _: jax_variant(size, device, torch.float32)
    return found


def measure(name: str, size: Size, device: str, rounds: int, makers: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a variant."""
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    (first, base), *others = makers.items()
    at_once = TOGETHER if device == "cuda" else len(others)
    rows: dict[str, dict[str, Any]] = {}
    for start in range(0, max(len(others), 1), max(at_once, 1)):
        running: dict[str, Variant] = {}
        compiling: dict[str, float] = {}
        for label, make in [(first, base), *others[start : start + at_once]]:
            try:
                variant = make(size, dtype)
                compiling[label] = seconds(variant, 1)[0]
                seconds(variant, 2)
                running[label] = variant
            except Exception as error:  # a peer that fails is a result
                print(f"{name}: {label}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
                rows[label] = {"size": name, "variant": label, "failed": type(error).__name__}
        for label, timing in interleaved(running, size.steps, rounds).items():
            rows.setdefault(
                label,
                {
                    "size": name,
                    "variant": label,
                    "median_ms": round(timing.quartiles[1], 3),
                    "quartiles_ms": [round(timing.quartiles[0], 3), round(timing.quartiles[2], 3)],
                    "ratio_to_eager": round(timing.ratio, 3),
                    "host_ms": round(timing.host, 3),
                    "first_call_s": round(compiling[label], 2),
                },
            )
        running.clear()
        torch._dynamo.reset()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return list(rows.values())


def alone(name: str, device: str, rounds: int, labels: list[str], flags: list[str]) -> list[dict[str, Any]]:
    """As `measure`, each variant in processes of its own, in turns."""
    found: dict[str, list[dict[str, Any]]] = {label: [] for label in labels}
    turns = random.Random(0)
    for _ in range(PROCESSES):
        for label in turns.sample(labels, len(labels)):
            command = [sys.executable, __file__, f"--device={device}", f"--rounds={rounds}", "--sizes", name, *flags]
            run = subprocess.run([*command, "--child", label], stdout=subprocess.PIPE, text=True)
            if run.returncode:
                print(f"{name}: {label}: failed", file=sys.stderr)
            else:
                found[label].append(json.loads(run.stdout.splitlines()[-1]))
    base = statistics.median(row["median_ms"] for row in found[labels[0]])
    rows: list[dict[str, Any]] = []
    for label, several in found.items():
        if not several:
            rows.append({"size": name, "variant": label, "failed": "process"})
            continue
        middle = sorted(several, key=lambda row: row["median_ms"])[len(several) // 2]
        spread = [min(row["median_ms"] for row in several), max(row["median_ms"] for row in several)]
        rows.append({**middle, "quartiles_ms": spread, "ratio_to_eager": round(middle["median_ms"] / base, 3)})
    return rows


def child(name: str, label: str, device: str, rounds: int, makers: dict[str, Any]) -> None:
    """One variant, in this process: its row as JSON."""
    known = GPU_SIZES if device == "cuda" else CPU_SIZES
    (row,) = measure(name, known[name], device, rounds, {label: makers[label]})
    print(json.dumps(row))


def start(name: str, label: str, makers: dict[str, Any]) -> None:
    """The first steps of one variant, in this process: seconds of the first call and the most resident MB, as JSON."""
    variant = makers[label](KNOWN[name], torch.bfloat16)
    first, _ = seconds(variant, 1)
    seconds(variant, 3)
    print(json.dumps({"first_call_s": round(first, 2), "peak_mb": round(kilobytes("VmHWM") / 1024)}))


def public(chosen: list[str], rounds: int, makers: dict[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """A table and its rows, of every model and variant."""
    rows: list[dict[str, Any]] = []
    for name in chosen:
        for row in measure(name, KNOWN[name], "cpu", rounds, makers):
            if "failed" not in row:
                starts = in_fresh_processes(__file__, ["--public", "--sizes", name, "--start", row["variant"]], times=2)
                for when, measured in zip(("cold", "warm"), starts):
                    row |= {f"{what}_{when}": value for what, value in measured.items()}
                del row["first_call_s"]
            rows.append(row)
    measures = [f"{what}_{when}" for what in ("first_call_s", "peak_mb") for when in ("cold", "warm")]
    cells = [
        (row["size"], row["variant"], f"failed: {row['failed']}", *[""] * 6)
        if "failed" in row
        else (
            *(row["size"], row["variant"], row["median_ms"], " to ".join(map(str, row["quartiles_ms"]))),
            *(row["ratio_to_eager"], *(row[measure] for measure in measures)),
        )
        for row in rows
    ]
    columns = ("model", "variant", "median ms", "quartiles ms", "time over eager")
    first = ("first call s, cold", "s, compiled artifacts kept", "peak RSS MB, cold", "MB, compiled artifacts kept")
    return table((*columns, *first), cells), rows


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = arguments(__doc__)
    parser.add_argument("--alone", action="store_true", help="every variant in processes of its own")
    parser.add_argument("--only", help="names of variants beside the eager one, separated by semicolons")
    parser.add_argument("--child", help="one variant, for --alone")
    parser.add_argument("--public", action="store_true", help="models of transformers and timm")
    parser.add_argument("--start", help="one variant's first steps, for --public")
    parser.add_argument("--sizes", help="names, separated by semicolons")
    parser.add_argument("--forms", action="store_true", help="funcamp's own options too")
    parser.add_argument("--keep-memory", action="store_true", help="let malloc keep freed blocks of any size")
    args = parser.parse_args()
    if args.keep_memory and os.environ.get("GLIBC_TUNABLES") != KEEP:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "GLIBC_TUNABLES": KEEP})
    if not args.child and not args.start:
        cold = tempfile.TemporaryDirectory()  # so that the first call shows the whole compilation
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cold.name
    if args.public and args.device != "cpu":
        parser.error("--public must be measured on a CPU")
    if args.public and not all(map(importlib.util.find_spec, PACKAGES)):
        parser.error(f"--public needs {', '.join(PACKAGES)}: pip install -c constraints.txt -e '.[models]'")
    known = PUBLIC_SIZES if args.public else GPU_SIZES if args.device == "cuda" else CPU_SIZES
    chosen = args.sizes.split(";") if args.sizes else list(known)
    makers = variants(args.device, forms=args.forms)
    if args.public:
        makers = {name: makers[name] for name in (*PEERS, "funcamp.jit")}
    if args.only:
        makers = {name: make for name, make in makers.items() if name in (next(iter(makers)), *args.only.split(";"))}
    if args.child:
        child(chosen[0], args.child, args.device, args.rounds, makers)
        return
    if args.start:
        start(chosen[0], args.start, makers)
        return
    if args.public:
        body, rows = public(chosen, args.rounds, makers)
        versions = {name: importlib.metadata.version(name) for name in PACKAGES}
        facts = about(args.device, **versions, rounds=args.rounds)
        stem = write(args.out, "step-public-cpu", "A whole training step of public models", facts, body, rows)
        points = [(row["size"], row["variant"], row["ratio_to_eager"]) for row in rows if "failed" not in row]
        dots(stem, points, "time of a step over torch's eager loop", "funcamp")
        return
    rows = []
    for name in chosen:
        if args.alone:
            flags = ["--forms"] * args.forms
            rows += alone(name, args.device, args.rounds, list(makers), flags)
        else:
            rows += measure(name, known[name], args.device, args.rounds, makers)
    jax = importlib.util.find_spec("jax") and __import__("jax").__version__
    malloc = KEEP if args.keep_memory else "as the system has it"
    facts = about(args.device, jax=jax or "not installed", rounds=args.rounds, malloc=malloc)
    cells = [
        (row["size"], row["variant"], f"failed: {row['failed']}", "", "", "", "")
        if "failed" in row
        else (
            *(row["size"], row["variant"], row["median_ms"], " to ".join(map(str, row["quartiles_ms"]))),
            *(row["ratio_to_eager"], row["host_ms"], row["first_call_s"]),
        )
        for row in rows
    ]
    spread = "fastest to slowest process" if args.alone else "quartiles ms"
    columns = ("model", "variant", "median ms", spread, "time over eager", "host ms", "first call s")
    suffix = ("-alone" if args.alone else "") + ("-forms" if args.forms else "") + ("-kept" if args.keep_memory else "")
    stem = write(args.out, f"step-{args.device}{suffix}", "A whole training step", facts, table(columns, cells), rows)
    points = [(row["size"], row["variant"], row["ratio_to_eager"]) for row in rows if "failed" not in row]
    dots(stem, points, "time of a step over torch's eager loop", "funcamp")


if __name__ == "__main__":
    main()
