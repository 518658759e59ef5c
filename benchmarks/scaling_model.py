"""What share of a data parallel step on 8, 64 and 512 GPUs is communication?

A model, not a measurement.

    python benchmarks/scaling_model.py [--sizes "1.3 B"] [--out DIR]
"""

from __future__ import annotations

import math
from typing import Any

from _timing import about, arguments, chosen, table, write

NVLINK = 450e9 * 0.8  # bytes a second and direction of an H100's NVLink, of which NCCL reaches about this share
NETWORK = 50e9 * 0.8  # a 400 Gb/s rail a GPU
# Seconds of one hop, with the kernel's own part.
HOP_NVLINK = 2e-6
HOP_NETWORK = 6e-6
PEAK = 989e12  # dense float16 FLOPs a second of an H100
REACHED = 0.4  # by large models
TOKENS = 4_096  # a GPU and step
MODELS = {"124 M": 124e6, "1.3 B": 1.3e9, "7 B": 7e9}
GPUS = (8, 64, 512)

#: What is computed, for the result file.
FORMULAS = """\
    all-reduce of B bytes over n = nodes * 8 GPUs, in two levels (NCCL's NVLink domains, then one rail a GPU):
        time = 2 (8-1)/8 B / nvlink + 2 (nodes-1)/nodes (B/8) / network + latency
        latency = 2 log2(8) hop_nvlink + 2 log2(nodes) hop_network
    reduce-scatter and all-gather take half of that each, so shard=True moves the same bytes.
    gradients: 2 bytes a parameter with DataParallel(dtype=torch.bfloat16); 4 (float32) without it, and under DDP.
    small: vectors, loss and buffers share one all-reduce, of latency alone; with shard=True two more, for the norm and
        the flag, that the optimizer waits for.
    compute: 6 FLOPs a parameter and token, at a share of the peak that large models reach.

What it leaves out: contention, stragglers, the time that communication kernels take from computing ones.
"""


def latency(gpus: int) -> float:
    """Seconds of an all-reduce of nothing."""
    return 2 * math.log2(8) * HOP_NVLINK + 2 * math.log2(gpus // 8) * HOP_NETWORK


def all_reduce(size: float, gpus: int) -> float:
    """Seconds of an all-reduce of so many bytes."""
    nodes = gpus // 8
    return 2 * 7 / 8 * size / NVLINK + 2 * (nodes - 1) / nodes * size / 8 / NETWORK + latency(gpus)


def row(name: str, parameters: float, gpus: int) -> dict[str, Any]:
    """One model on so many GPUs."""
    compute = 6 * parameters * TOKENS / (PEAK * REACHED)
    ours = all_reduce(2 * parameters, gpus)
    ddp = all_reduce(4 * parameters, gpus)
    # A third of the arithmetic makes weight gradients, beside which the sums of those before can run.
    left_over = max(0.0, ours - compute / 3)
    return {
        "model": name,
        "gpus": gpus,
        "compute_ms": round(compute * 1e3, 1),
        "gradients_ms": round(ours * 1e3, 1),
        "ddp_gradients_ms": round(ddp * 1e3, 1),
        "scalars_us": round(latency(gpus) * 1e6),
        "share_bare": round(ours / (compute + ours), 3),
        "share_beside": round(left_over / (compute + left_over), 3),
    }


def main() -> None:
    """Print, and write the result files where asked."""
    parser = arguments(__doc__)
    args = parser.parse_args()
    rows = []
    for name, parameters in chosen(parser, args, MODELS).items():
        rows += [row(name, parameters, gpus) for gpus in GPUS]
    columns = (
        "parameters",
        "GPUs",
        "compute, ms",
        "16-bit gradients, ms",
        "float32 gradients, as DDP's, ms",
        "an all-reduce of one number, us",
        "share of the step with 16 bits, nothing beside it",
        "with buckets",
    )
    formulas = [line.strip() for line in FORMULAS.splitlines()]
    facts = about("cpu", tokens=f"{TOKENS} a GPU", GPU="H100, 8 a node, figures of its data sheet", measured="nothing")
    body = [*formulas, "", *table(columns, [tuple(entry.values()) for entry in rows])]
    write(args.out, "scaling-model", "Many GPUs: a model", facts, body, rows)


if __name__ == "__main__":
    main()
