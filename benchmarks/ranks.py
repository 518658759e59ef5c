"""What does a data parallel step cost on 1, 2 and 4 processes, each with its own batch?

Weak scaling: the batch of a process stays, so with a core for each a perfect step takes as long on many as on one. One
thread a process. Collectives and their bytes are counted in the traced graph. Peers in the same processes: torch's
DistributedDataParallel with GradScaler, autocast and fused AdamW.

    python benchmarks/ranks.py [--rounds 9] [--sizes "MLP 3.2 M"] [--out DIR]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _models import CPU_SIZES, Size, build, cross_entropy
from _timing import Report, Row, about, arguments, chosen, interleaved, seconds, torch_variant
from _variants import LR, funcamp_step
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]

import funcamp
from funcamp import distributed

SIZES = ("MLP 0.14 M", "MLP 3.2 M")
WORLDS = (1, 2, 4)
FORMS: dict[str, dict[str, Any]] = {
    "funcamp.jit": {},
    "funcamp.jit, cut over ranks": {"shard": True},
}


def ddp(size: Size) -> Callable[[], None]:
    """torch's loop with DistributedDataParallel."""
    model, x, y = build(size, "cpu")
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    adamw = torch.optim.AdamW(wrapped.parameters(), lr=LR, fused=True)
    scaler = torch.amp.GradScaler("cpu", growth_interval=10**6)

    def step() -> None:
        adamw.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = wrapped(x)
        loss: Any = scaler.scale(cross_entropy(output, y))
        loss.backward()
        scaler.step(adamw)
        scaler.update()

    return step


def traffic(size: Size, parallel: distributed.DataParallel) -> tuple[dict[str, int], int]:
    """The collectives of a step, and the bytes that go into them on one rank."""
    model, x, y = build(size, "cpu")
    adamw = funcamp.stateless(torch.optim.AdamW, lr=LR)
    loss_fn = funcamp.module_loss(model, cross_entropy)
    step = funcamp.make_train_step(loss_fn, adamw, policy="bfloat16", parallel=parallel)
    calls: dict[str, int] = {}
    moved = 0

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal moved
        for node in graph.graph.nodes:
            name = str(node.target)
            if name.startswith("_c10d_functional.") and "wait_tensor" not in name:
                kind = name.split(".")[1]
                calls[kind] = calls.get(kind, 0) + 1
                value = node.args[0].meta["val"]
                moved += value.numel() * value.element_size()
        return make_boxed_func(graph.forward)

    torch.compile(step, fullgraph=True, backend=aot_autograd(fw_compiler=count))(step.init(), (x, y))
    torch._dynamo.reset()
    return calls, moved


def child(name: str, rounds: int, out: str) -> None:
    """Measure on this rank; the first one writes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = CPU_SIZES[name]
    made: dict[str, Any] = {"DDP, GradScaler": ddp(size)}
    rows: dict[str, dict[str, Any]] = {"DDP, GradScaler": {}}
    for label, options in FORMS.items():
        parallel = distributed.DataParallel(**options)
        calls, moved = traffic(size, parallel)
        rows[label] = {"collectives": calls, "bytes": moved}
        made[label] = funcamp_step(size, "cpu", torch.bfloat16, parallel=parallel)
    variants = {label: torch_variant(call, "cpu") for label, call in made.items()}
    for variant in variants.values():
        seconds(variant, 2)
    for label, timing in interleaved(variants, size.steps, rounds).items():
        rows[label] |= {
            "size": name,
            "processes": dist.get_world_size(),
            "variant": label,
            **timing,
        }
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(list(rows.values())))
    dist.barrier()
    # Taking DDP down may wait for ever, with the GIL held, for a thread that wants it:
    # https://github.com/pytorch/pytorch/issues/56297.
    os._exit(0)


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = arguments(__doc__)
    parser.add_argument("--child", help="a file: one size, on this rank")
    args = parser.parse_args()
    if args.child:
        child(args.sizes, args.rounds, args.child)
        return
    columns = {
        "model": "size",
        "processes": "processes",
        "variant": "variant",
        "median ms": "median_ms",
        "quartiles ms": "quartiles_ms",
        "over one process": "over_one_process",
        "over DDP": "ratio",
        "collectives a step": "calls",
        "MB into them": "megabytes",
    }
    facts = about("cpu", cores=os.cpu_count(), backend="gloo", threads="1 a process", rounds=args.rounds)
    report = Report(args.out, "ranks-cpu", "Data parallel steps", facts, columns)
    for name in chosen(parser, args, {name: CPU_SIZES[name] for name in SIZES}):
        ms_of_one_process: dict[str, float] = {}
        for world in WORLDS:
            with tempfile.TemporaryDirectory() as folder:
                torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
                out = Path(folder, "rows.json")
                command = [*torchrun, __file__, "--sizes", name, f"--rounds={args.rounds}", "--child", str(out)]
                subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
                rows: list[Row] = json.loads(out.read_text())
            for row in rows:
                alone = ms_of_one_process.setdefault(row["variant"], row["median_ms"])
                row["over_one_process"] = round(row["median_ms"] / alone, 2)
                collectives = row.get("collectives", {})
                row["calls"] = ", ".join(f"{count} {kind}" for kind, count in collectives.items())
                row["megabytes"] = f"{row['bytes'] / 1e6:.2f}" if "bytes" in row else ""
            report.add(rows)


if __name__ == "__main__":
    main()
