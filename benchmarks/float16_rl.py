"""Does float16 train a policy by GRPO as well as bfloat16 and float32, and how near are rollout and trainer?

examples/grpo.py over several seeds, compiled: with a rollout that computes as an inference engine does, and with the
trainer's own forward pass. The gap is the difference of the log-probabilities of rollout and trainer, of every digit
drawn, before the first update of a step. Solved is the share of sampled answers that are right.

    python benchmarks/float16_rl.py [--sizes "engine;..."] [--seeds 5] [--steps 300] [--out DIR]
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from _plots import bands
from _timing import Report, Row, about, arguments, check_on_cpu, chosen

import funcamp
from funcamp import presets

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import grpo

#: The rollout, the scaler if it is not the example's own, the dtypes, and whether all seeds are run: with the trainer's
#: own forward pass only the gap is in question.
SIZES: dict[str, tuple[str, funcamp.ScalerConfig | None, tuple[str, ...], bool]] = {
    "engine": ("engine", None, grpo.DTYPES, True),
    "trainer": ("trainer", None, grpo.DTYPES, False),
    "engine, scale 1": ("engine", presets.static(1.0), ("float16",), True),
}
EVERY = 10
LAST = 20
"""Steps in a point of a curve, and in the end of a run."""


def points(rows: list[Row], name: str) -> list[float]:
    """The curve of a run: means over some steps."""
    return [
        float(f"{statistics.mean(row[name] for row in rows[start : start + EVERY]):.4g}")
        for start in range(0, len(rows), EVERY)
    ]


def measure(size: str, dtype: str, seeds: int, steps: int) -> Row:
    """The row of a dtype, over its seeds; one program for all."""
    rollout, config, _, every_seed = SIZES[size]
    seeds = seeds if every_seed else 1
    learner = grpo.make_learner(dtype, steps, config)
    run = funcamp.jit(grpo.make_step(learner, dtype, rollout))
    next(grpo.train(run, grpo.first_state(learner, 0), 1, 0))
    begun = time.process_time()
    runs = [list(grpo.train(run, grpo.first_state(learner, seed), steps, seed)) for seed in range(seeds)]
    seconds = time.process_time() - begun
    ends = [statistics.mean(row["solved"] for row in rows[-LAST:]) for rows in runs]
    scales = [math.log2(rows[-1]["scale"]) for rows in runs]
    every = [row for rows in runs for row in rows]
    skipped = [rows[-1]["skipped"] for rows in runs]
    return {
        "size": size,
        "variant": dtype,
        "seeds": seeds,
        "solved": round(statistics.mean(ends), 3),
        "solved_of_seeds": [round(min(ends), 3), round(max(ends), 3)],
        "gap": f"{statistics.mean(row['gap'] for row in every):.1e}",
        "gap_max": f"{max(row['gap_max'] for row in every):.1e}",
        "skipped": [int(min(skipped)), int(max(skipped))],
        "log2_scale": [min(scales), max(scales)],
        "cpu_ms": round(seconds / len(every) * 1e3, 1),
        "curves": {name: [points(rows, name) for rows in runs] for name in ("reward", "solved", "gap", "kl")},
    }


def draw(report: Report) -> None:
    """The curves of the first kind of rollout that was measured."""
    rows = [row for row in report.rows if row["size"] == report.rows[0]["size"]]
    panels = {"answers solved": "solved", "gap per digit": "gap"}
    curves: Any = {label: {row["variant"]: row["curves"][key] for row in rows} for label, key in panels.items()}
    bands(report.stem, curves, EVERY, "step")


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    check_on_cpu(parser, args)
    columns = {
        "rollout": "size",
        "dtype": "variant",
        "solved at the end": "solved",
        "worst and best seed": "solved_of_seeds",
        "seeds": "seeds",
        "mean gap": "gap",
        "largest gap": "gap_max",
        "skipped": "skipped",
        "log2 of the last scale": "log2_scale",
        "CPU ms a step": "cpu_ms",
    }
    facts = about(args.device, steps=args.steps)
    report = Report(args.out, "float16-rl-cpu", "GRPO in float16, bfloat16 and float32", facts, columns)
    for size, (_, _, dtypes, _) in chosen(parser, args, SIZES).items():
        for dtype in dtypes:
            report.add([measure(size, dtype, args.seeds, args.steps)])
        draw(report)


if __name__ == "__main__":
    main()
