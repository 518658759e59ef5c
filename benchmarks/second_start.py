"""How long is a second start: of `jit`, of `jit` with torch's cache artifacts, and of a step from a file?

A GPT of width 64, bfloat16, AdamW. A first process compiles the step, saves it and the artifacts. Each number is from a
further process (for the artifacts from one only). It begins when torch, funcamp and torch's compiler are imported and
the model is built, if one is needed, and ends with the first step. The cache of Inductor is that of the first process
for `jit`, otherwise empty.

    python benchmarks/second_start.py [--sizes "12 blocks;48 blocks"] [--times 5] [--out DIR]
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx
from _models import Size, build, cross_entropy
from _timing import about, arguments, chosen, in_fresh_process, save, table
from torch import Tensor

import funcamp

SIZES = {"4 blocks": 4, "12 blocks": 12, "48 blocks": 48}
JIT = "funcamp.jit, compiled artifacts in the cache"
ARTIFACTS = "funcamp.jit, after torch.compiler.load_cache_artifacts"
FILE = "funcamp.load_step"
VARIANTS = (JIT, ARTIFACTS, FILE)


def made(blocks: int) -> tuple[Any, Any, Any]:
    """The jitted step, its state and a batch."""
    model, x, y = build(Size("gpt", blocks, 64, 2, 64), "cpu")
    step = funcamp.make_train_step(
        funcamp.module_loss(model, cross_entropy), funcamp.stateless(torch.optim.AdamW, lr=1e-4), policy="bfloat16"
    )
    return funcamp.jit(step), step.init(), (x, y)


def first(blocks: int, folder: Path) -> dict[str, float]:
    """Compile, and write the files; return their sizes and the state's, in MB."""
    run, state, batch = made(blocks)
    start = funcamp.clone(state)
    run(state, batch)
    run.save(folder / "step.pt", example_state=start)
    artifacts = torch.compiler.save_cache_artifacts()
    assert artifacts is not None
    (folder / "artifacts").write_bytes(artifacts[0])
    torch.save(batch, folder / "batch.pt")
    size = sum(leaf.nbytes for leaf in torch.utils._pytree.tree_leaves(start) if isinstance(leaf, Tensor))
    return {
        "state": size / 1e6,
        "file": (folder / "step.pt").stat().st_size / 1e6,
        "artifacts": len(artifacts[0]) / 1e6,
    }


def later(variant: str, blocks: int, folder: Path) -> float:
    """Return the seconds of a second start, in this process."""
    if variant == FILE:
        batch = torch.load(folder / "batch.pt")
        start = time.perf_counter()
        run = funcamp.load_step(folder / "step.pt")
        run(run.example_state, batch)
        return time.perf_counter() - start
    run, state, batch = made(blocks)
    start = time.perf_counter()
    if variant == ARTIFACTS:
        torch.compiler.load_cache_artifacts((folder / "artifacts").read_bytes())
    run(state, batch)
    return time.perf_counter() - start


def spawned(cache: Path, *given: str) -> Any:
    """Return what a further process prints last."""
    cache.mkdir(exist_ok=True)
    return in_fresh_process(__file__, ["--child", *given], str(cache))


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = arguments(__doc__)
    parser.add_argument("--times", type=int, default=5, help="processes for each number")
    parser.add_argument("--child", nargs=3, help="what, blocks and folder: one measurement")
    args = parser.parse_args()
    if args.child:
        what, blocks, folder = args.child
        result = first(int(blocks), Path(folder)) if what == "first" else later(what, int(blocks), Path(folder))
        print(json.dumps(result))
        return
    rows, numbers = [], {}
    for name, blocks in chosen(parser, args, SIZES).items():
        with tempfile.TemporaryDirectory() as folder_name:
            folder = Path(folder_name)
            sizes = spawned(folder / "cache", "first", str(blocks), folder_name)
            seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
            for number in range(args.times):
                for variant in VARIANTS:
                    if variant == ARTIFACTS and number:  # it compiles all of the C++, in as much time as a first call
                        continue
                    cache = folder / ("cache" if variant == JIT else f"empty-{number}-{VARIANTS.index(variant)}")
                    seconds[variant].append(spawned(cache, variant, str(blocks), folder_name))
        megabytes = {JIT: "", ARTIFACTS: f"{sizes['artifacts']:.1f}", FILE: f"{sizes['file']:.1f}"}
        for variant, found in seconds.items():
            spread = f"{min(found):.2f} to {max(found):.2f}"
            rows.append((blocks, variant, f"{statistics.median(found):.2f}", spread, megabytes[variant]))
        numbers[name] = {"seconds": seconds, "megabytes": sizes}
        columns = ("blocks", "second start", "median s", "s", "MB of the file")
        facts = about("cpu", times=args.times)
        save(args.out, "second-start-cpu", "A second start", facts, table(columns, rows), numbers)


if __name__ == "__main__":
    main()
