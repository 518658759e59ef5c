"""What does only the guard cost: check, norm and skip of a compiled step in bfloat16, whose scale is 1?

The same model and optimizer: a step whose gradients go to AdamW as they are, without check, norm or selection; the step
builder's, with the constant scale 1, which leaves out a step with a gradient that is inf or NaN and returns the norm;
and that with clipping to a norm. Each round times all of them, in a new order; a ratio is that of times of one round.
Medians and quartiles over the rounds.

    python benchmarks/guard.py [--device cuda] [--rounds 31] [--sizes "GPT 3.3 M;..."] [--out DIR]
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from _models import CPU_SIZES, GPU_SIZES, Size
from _timing import Report, Variant, about, arguments, chosen, measured, torch_variant
from _variants import funcamp_step
from price import unscaled

from funcamp import presets

#: An MLP and a GPT of about 3 million parameters, and for a try the smallest MLP.
NAMES = ("MLP 3.2 M", "GPT 3.3 M")
TINY = "MLP 0.14 M"
MAX_NORM = 1.0


def guarded(size: Size, device: str, dtype: torch.dtype) -> Callable[[], Any]:
    """Check, norm and skip."""
    return funcamp_step(size, device, dtype, config=presets.disabled())


def clipped(size: Size, device: str, dtype: torch.dtype) -> Callable[[], Any]:
    """Check, norm, skip and clipping."""
    return funcamp_step(size, device, dtype, config=presets.disabled(), max_norm=MAX_NORM)


VARIANTS = {"without": unscaled, "check, norm and skip": guarded, "check, norm, skip and clipping": clipped}


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = arguments(__doc__, rounds=31)
    args = parser.parse_args()
    known = GPU_SIZES if args.device == "cuda" else CPU_SIZES
    args.sizes = args.sizes or ";".join(NAMES)
    columns = {
        "model": "size",
        "step": "variant",
        "median ms": "median_ms",
        "quartiles ms": "quartiles_ms",
        "over without": "ratio",
        "quartiles": "ratio_quartiles",
    }
    facts = about(args.device, rounds=args.rounds, dtype="bfloat16")
    report = Report(args.out, f"guard-{args.device}", "The price of check, norm and skip", facts, columns)

    def made(make: Callable[..., Callable[[], Any]], size: Size) -> Variant:
        return torch_variant(make(size, args.device, torch.bfloat16), args.device)

    for name, size in chosen(parser, args, {name: known[name] for name in (*NAMES, TINY)}).items():
        makers = {label: functools.partial(made, make, size) for label, make in VARIANTS.items()}
        report.add(measured(name, makers, size.steps, args.rounds, args.device))


if __name__ == "__main__":
    main()
