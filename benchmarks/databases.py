"""Does Inductor compute what torch computes, for every operation of torch's own database, forward and backward?

    python benchmarks/databases.py [--sizes "add;bmm"] [--out benchmarks/results]

For each operation the first sample with which torch tests it: a step that calls the operation, differentiates a
weighted sum of its results, and takes a step of gradient descent. `jit` compiles it with its default options and with
exact=True. Several operations are one program, because compiling takes the time; those of a program that fails are
compiled one by one, in processes, so that a crash is a result too. "error" is the largest difference from the eager
result, in multiples of the rounding of the eager one (its distance from double precision if that is more): a small
number is another order of sums, and more than 16 is a finding. Numbers drawn at random are compared with exact=True
only. What `jit` without a compiler already refuses, or computes otherwise, is left out.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from _timing import Report, Row, about, arguments, chosen

import funcamp
from tests.support.databases import LIMIT, SEED, Expected, expected_of, joined, operations, worst_error

OPERATIONS_IN_A_PROGRAM = 25
SECONDS = 300
SECONDS_EACH = 60
"""For a process, and more for each operation in it."""
VARIANTS: dict[str, dict[str, Any]] = {"default": {}, "exact=True": {"exact": True}}


def rows_of(programs: dict[str, Expected], variant: str) -> Iterator[Row]:
    """Compile operations as one program and compare each; one by one if that fails."""
    names = list(programs)
    together = joined([expected.case for expected in programs.values()])
    step = funcamp.jit(together.step, **VARIANTS[variant])
    try:
        torch.manual_seed(SEED)
        new, metrics = step(together.state, together.batch)
    except Exception as error:
        for half in (names[: len(names) // 2], names[len(names) // 2 :]) if len(names) > 1 else ():
            yield from rows_of({name: programs[name] for name in half}, variant)
        if len(names) == 1:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            yield {"size": names[0], "variant": variant, "failed": text}
        return
    finally:
        torch._dynamo.reset()
    for (name, expected), state, rest in zip(programs.items(), new, metrics):
        # The draws of the operations before are others than when this one runs first.
        if expected.is_random and variant == "exact=True" and len(programs) > 1:
            yield from rows_of({name: expected}, variant)
            continue
        largest = worst_error((state, rest), expected, random_too=variant == "exact=True")
        if largest > LIMIT and len(programs) > 1:
            yield from rows_of({name: expected}, variant)
            continue
        row: Row = {"size": name, "variant": variant, "error": f"{largest:.3g}"}
        yield row | {"finding": "differs"} if largest > LIMIT else row


def child(names: list[str], variants: list[str]) -> None:
    """Print a row for each operation and variant, as JSON."""
    warnings.simplefilter("ignore")
    programs: dict[str, Expected] = {}
    for name in names:
        expected = expected_of(name)
        if isinstance(expected, str):
            print(json.dumps({"size": name, "variant": "", "left_out": expected}), flush=True)
        else:
            programs[name] = expected
    for variant in variants if programs else ():
        for row in rows_of(programs, variant):
            print(json.dumps(row), flush=True)


def in_a_process(names: list[str], variants: list[str]) -> Iterator[Row]:
    """Yield the rows of a process; if it ends early, those of each operation that is missing, in its own process."""
    command = [sys.executable, __file__, "--child", "--sizes", ";".join(names), "--variants", ";".join(variants)]
    limit = SECONDS + SECONDS_EACH * len(names)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            out, _ = process.communicate(timeout=limit)
            reason = signal.Signals(-process.returncode).name if process.returncode < 0 else "ended early"
        except subprocess.TimeoutExpired:
            process.kill()
            out = process.communicate()[0]
            reason = f"more than {limit} s"
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    yield from rows
    for name in names:
        found = [row["variant"] for row in rows if row["size"] == name]
        missing = [] if "" in found else [variant for variant in variants if variant not in found]
        if missing and len(names) > 1:
            yield from (row for row in in_a_process([name], variants) if row["variant"] not in found)
        elif missing:
            yield {"size": name, "variant": missing[0], "failed": reason}


def main() -> None:
    """Compile all operations, print, and write the result files where asked."""
    parser = arguments(__doc__)
    parser.add_argument("--variants", default=";".join(VARIANTS), help="names, separated by semicolons")
    parser.add_argument("--child", action="store_true", help="in this process; a row is a line of JSON")
    args = parser.parse_args()
    names = list(chosen(parser, args, operations()))
    variants = args.variants.split(";")
    if strangers := [name for name in variants if name not in VARIANTS]:
        parser.error(f"--variants must name {'; '.join(VARIANTS)}; got {'; '.join(strangers)}")
    if args.child:
        child(names, variants)
        return
    columns = {
        "operation": "size",
        "variant": "variant",
        "error": "error",
        "finding": "finding",
        "left out": "left_out",
    }
    facts = about(args.device, operations=len(names), limit=LIMIT)
    report = Report(args.out, "databases-cpu", "torch's operations, compiled", facts, columns)
    for start in range(0, len(names), OPERATIONS_IN_A_PROGRAM):
        report.add(in_a_process(names[start : start + OPERATIONS_IN_A_PROGRAM], variants))


if __name__ == "__main__":
    main()
