"""How many of seventy models of public packages does a step take unchanged, and what do compiled ones take and give?

    python benchmarks/coverage.py [--sizes "GPT-2;Llama"] [--dtypes float16] [--parity] [--out benchmarks/results]

Each model has its own form of batch and its dropout on: 20 steps of `torch.autocast`, `torch.amp.GradScaler` and SGD
with momentum, and the same steps of funcamp, eager, traced (`jit` without a compiler) and compiled; beside the compiled
ones, torch's loop around `torch.compile(model)`. float16 begins with a scale that overflows. Scales and skips must be
equal. The difference of parameters is the largest in a tensor, over the largest change of that tensor in the run (over
a thousandth of the largest change of any tensor if that is more: the gradient of the bias of attention's keys is zero
but for rounding).
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import math
import re
import subprocess
import warnings
from collections.abc import Callable
from typing import Any

import torch
from _public import PACKAGES
from _timing import Report, Row, Variant, about, arguments, chosen, in_fresh_processes, measured, torch_variant
from _zoo import ZOO, Task, task
from torch import Tensor

import funcamp

STEPS = 20
LR = 0.01
HIGH = 2.0**20
"""The first scale in float16, which overflows."""
INTERVAL = 4
"""Steps without an overflow after which the scale grows."""
DTYPES = ("float16", "bfloat16")
ALSO = ("diffusers", "peft", "torch_geometric", "scipy")
SECONDS = 900
"""For one model in one dtype."""

Make = Callable[[], Task]
"""A fresh model of the same numbers, with its batches."""
History = tuple[list[tuple[float, bool]], dict[str, Tensor], list[float]]


def init_scale(dtype: str) -> float:
    """A scale to begin with: too high for float16."""
    return HIGH if dtype == "float16" else 1.0


def torch_loop(given: Task, dtype: str) -> tuple[Callable[[Any], tuple[Tensor, bool]], Any]:
    """The usual loop, from a batch to the loss and whether the step was skipped; and its scaler."""
    optimizer = torch.optim.SGD(given.model.parameters(), lr=LR, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale(dtype), growth_interval=INTERVAL)
    compute = getattr(torch, dtype)

    def step(batch: Any) -> tuple[Tensor, bool]:
        optimizer.zero_grad()
        with torch.autocast("cpu", compute):
            loss = loss_of(given, batch)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach(), scaler.get_scale() < before

    return step, scaler


def loss_of(given: Task, batch: Any) -> Tensor:
    """The loss as its owner computes it."""
    if given.criterion is not None:
        return given.criterion(given.model(*batch[:-1]), batch[-1])
    out = given.model(**batch)
    return out if isinstance(out, Tensor) else out.loss


def batches(given: Task, steps: int = STEPS) -> list[Any]:
    """The batches of a run."""
    torch.manual_seed(1)
    return [given.batch() for _ in range(steps)]


def by_torch(make: Make, dtype: str, compiled: bool = False, steps: int = STEPS) -> History:
    """Scales and skips, the parameters after the run, and the losses."""
    given = make()
    model: Any = torch.compile(given.model) if compiled else given.model
    step, scaler = torch_loop(given._replace(model=model), dtype)
    trail = []
    losses = []
    rows = batches(given, steps)
    torch.manual_seed(2)
    for batch in rows:
        loss, skipped = step(batch)
        trail.append((scaler.get_scale(), skipped))
        losses.append(loss.item())
    return trail, {key: value.detach() for key, value in given.model.named_parameters() if value.requires_grad}, losses


def step_of(given: Task, dtype: str) -> tuple[Any, Any]:
    """funcamp's step, and its first state."""
    loss_fn = funcamp.module_loss(given.model, given.criterion, keep_buffers=True)
    sgd = funcamp.stateless(torch.optim.SGD, lr=LR, momentum=0.9)
    config = funcamp.ScalerConfig(init_scale=init_scale(dtype), growth_interval=INTERVAL)
    step = funcamp.make_train_step(loss_fn, sgd, config, policy=dtype)
    return step, step.init(consume=True)


def by_funcamp(make: Make, dtype: str, wrap: Callable[[Any], Any], steps: int = STEPS) -> History:
    """The same of funcamp's step."""
    given = make()
    step, state = step_of(given, dtype)
    run = wrap(step)
    trail = []
    losses = []
    rows = batches(given, steps)
    torch.manual_seed(2)
    for batch in rows:
        state, metrics = run(state, batch)
        trail.append((state.scaler.scale.item(), bool(metrics.found_inf)))
        losses.append(metrics.loss.item())
    return trail, dict(state.params.tree()), losses


def compared(found: History, wanted: History, first: dict[str, Tensor]) -> str:
    """How two runs compare: bit for bit; by how much of its change a parameter is apart; or what is not equal."""
    names = ("scales and skips", "losses")
    pairs = zip(names, (found[0], found[2]), (wanted[0], wanted[2]))
    odd = [name for name, ours, theirs in pairs if str(ours) != str(theirs)]  # NaN is equal to NaN
    moved = {key: (value - first[key]).abs().max().item() for key, value in wanted[1].items() if value.numel()}
    least = max(moved.values()) / 1000
    worst = 0.0
    for key in moved:
        apart = (found[1][key] - wanted[1][key]).abs().max().item()
        worst = max(worst, apart / max(moved[key], least) if least else math.inf if apart else 0.0)
    if names[0] in odd:
        return "other scales or skips"
    if not odd and not worst:
        return "bit for bit"
    return f"equal scales and skips, parameters to {worst:.0e}"


def attempt(run: Callable[[], History], wanted: History, first: dict[str, Tensor]) -> str:
    """What comes of a run, or what it failed with."""
    try:
        return compared(run(), wanted, first)
    except Exception as error:
        return describe_error(error)


def describe_error(error: Exception) -> str:
    """An error in a line: where a model reads a value, by its place in its package, or the first line of another."""
    text = str(error).strip().split("\n")[0].replace("|", "/")
    if found := re.search(rf"((?:{'|'.join((*PACKAGES, *ALSO))})/[^ ]+:\d+) (\(.*\)) does:", text):
        return f"refused: reads a value at {found[1]} {found[2]}"
    return f"{type(error).__name__}: {text[:300]}"


def measure_model(name: str, make: Make, dtype: str, parity: bool, steps: int = STEPS) -> Row:
    """The row of a model in a dtype."""
    warnings.simplefilter("ignore")
    first = {key: value.detach().clone() for key, value in make().model.named_parameters()}
    row: Row = {"size": name, "variant": dtype, "parameters": sum(value.numel() for value in first.values())}
    try:
        wanted = by_torch(make, dtype, steps=steps)
    except Exception as error:
        return row | {"failed": f"torch's own loop: {error}".splitlines()[0][:120]}
    row["skips"] = sum(skipped for _, skipped in wanted[0])

    def ours(wrap: Callable[[Any], Any]) -> str:
        return attempt(lambda: by_funcamp(make, dtype, wrap, steps), wanted, first)

    row["eager"] = ours(lambda step: step)
    row["traced"] = ours(functools.partial(funcamp.jit, backend="eager"))
    if not parity:
        row |= speed(name, make, dtype)  # first: its first calls find nothing compiled
        row["compiled"] = ours(funcamp.jit)
        if dtype == "float16":
            row["exact"] = ours(functools.partial(funcamp.jit, exact=True))
        row["torch's compiled"] = attempt(lambda: by_torch(make, dtype, compiled=True), wanted, first)
    return row


def speed(name: str, make: Make, dtype: str) -> Row:
    """Seconds of the first calls, and the time of a step over the eager loop's."""

    def loop(compiled: bool) -> Variant:
        given = make()
        batch = batches(given)[0]
        model: Any = torch.compile(given.model) if compiled else given.model
        step, _ = torch_loop(given._replace(model=model), dtype)
        return torch_variant(lambda: step(batch), "cpu")

    def ours() -> Variant:
        given = make()
        batch = batches(given)[0]
        step, state = step_of(given, dtype)
        run = funcamp.jit(step)
        held = [state]

        def call() -> None:
            held[0], _ = run(held[0], batch)

        return torch_variant(call, "cpu")

    makers = {"eager": lambda: loop(False), "torch.compile(model)": lambda: loop(True), "funcamp.jit": ours}
    row: Row = {}
    for found in measured(name, makers, 3, 5, "cpu"):
        for key in ("first_call_s", "median_ms", "ratio", "failed"):
            if key in found:
                row[f"{found['variant']} {key}"] = found[key]
    return row


def in_a_process(name: str, dtype: str) -> Row:
    """A row of a process of its own."""
    row: Row = {"size": name, "variant": dtype}
    try:
        found: list[Row] = in_fresh_processes(__file__, ["--sizes", name, "--one", dtype], 1, SECONDS)
        return found[0]
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        return row | {"failed": type(error).__name__}


def compiled_columns(dtype: str) -> dict[str, str]:
    """What a table of compiled steps has beside the model; how exact a step rounds matters for float16's overflows."""
    labels = ("funcamp.jit", "torch.compile(model)")
    exact = {"with exact=True": "exact"} if dtype == "float16" else {}
    columns = {labels[0]: "compiled", **exact, labels[1]: "torch's compiled"}
    columns |= {f"{label}, time over eager": f"{label} ratio" for label in labels}
    return columns | {f"{label}, first call s": f"{label} first_call_s" for label in labels}


def main() -> None:
    """Run all, and write what is known after each."""
    parser = arguments(__doc__)
    parser.add_argument("--dtypes", default=";".join(DTYPES))
    parser.add_argument("--parity", action="store_true", help="leave out Inductor: no compiling, no times")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = chosen(parser, args, ZOO)
    if args.one:
        name = next(iter(names))
        print("\n" + json.dumps(measure_model(name, functools.partial(task, name), args.one, parity=False)))
        return
    facts = about("cpu", steps=STEPS, **{name: importlib.metadata.version(name) for name in (*PACKAGES, *ALSO)})
    title = "Models of public packages"
    columns = {"model": "size", "dtype": "variant"}
    if args.parity:
        columns |= {"parameters": "parameters", "skipped": "skips", "eager step": "eager", "traced": "traced"}
        report = Report(args.out, "coverage-parity-cpu", title, facts, columns)
        for name in names:
            make = functools.partial(task, name)
            report.add(measure_model(name, make, dtype, parity=True) for dtype in args.dtypes.split(";"))
        return
    for dtype in args.dtypes.split(";"):
        also = compiled_columns(dtype)
        report = Report(args.out, f"coverage-{dtype}-cpu", f"{title}, compiled", facts, columns | also)
        for name in names:
            report.add([in_a_process(name, dtype)])


if __name__ == "__main__":
    main()
