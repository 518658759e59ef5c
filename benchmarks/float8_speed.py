"""How fast are float8 products, and a training step of wide blocks with them, against bfloat16?

A product is forward and backward of a linear layer, compiled: three products and their casts and amaxes. A step is
`funcamp.jit`'s, with AdamW. On a CPU this shows only that it runs: torch computes float8 products in float32 there.

    python benchmarks/float8_speed.py [--device cuda] [--rounds 9] [--sizes "8,192 x 4,096 x 4,096;..."] [--out DIR]
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _models import Size
from _timing import Report, Variant, about, arguments, chosen, measured, torch_variant
from _variants import UNSCALED, funcamp_step
from torch import Tensor

from funcamp import float8, module_loss
from funcamp._autograd.module_loss import ModuleLoss

#: A product has batch rows, width numbers in and vocabulary numbers out.
GPU_SIZES = {
    "8,192 x 4,096 x 4,096": Size("product", 0, 4096, 8192, vocabulary=4096, steps=20),
    "8,192 x 4,096 x 16,384": Size("product", 0, 4096, 8192, vocabulary=16384, steps=10),
    "8,192 x 8,192 x 8,192": Size("product", 0, 8192, 8192, vocabulary=8192, steps=10),
    "2 blocks of width 4,096, 8,192 tokens": Size("gpt", 2, 4096, 4, 2048, 256, steps=5),
    "8 blocks of width 1,024, 8,192 tokens": Size("gpt", 8, 1024, 8, 1024, 256, steps=5),
}
CPU_SIZES = {
    "64 x 64 x 64": Size("product", 0, 64, 64, vocabulary=64),
    "1 block of width 64, 32 tokens": Size("gpt", 1, 64, 1, 32, 64, steps=2),
}
CONFIGS = {
    "bfloat16": None,
    "float8": float8.Float8Config(),
    "float8 by row": float8.Float8Config("row", power_of_two=True),
}


def product(size: Size, device: str, kind: str) -> Variant:
    """Forward and backward of a linear layer whose input is bfloat16 and whose weight is float32."""
    torch.manual_seed(0)
    x = torch.randn(size.batch, size.width, device=device, dtype=torch.bfloat16)
    weight = torch.randn(size.vocabulary, size.width, device=device) * size.width**-0.5
    grad = torch.randn(size.batch, size.vocabulary, device=device, dtype=torch.bfloat16)
    config = CONFIGS[kind]

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        if config is None:
            return F.linear(x, weight.to(x.dtype))
        return float8.scaled_mm(x, weight, config)

    @functools.partial(torch.compile, fullgraph=True)
    def both(x: Tensor, weight: Tensor, grad: Tensor) -> Any:
        return torch.func.vjp(forward, x, weight)[1](grad)

    return torch_variant(lambda: both(x, weight, grad), device)


def step(size: Size, device: str, kind: str) -> Variant:
    """A training step without loss scaling."""
    config = CONFIGS[kind]

    def in_float8(loss_fn: ModuleLoss) -> ModuleLoss:
        if config is None:
            return loss_fn
        float8.convert(loss_fn.model, config)
        return module_loss(loss_fn.model, loss_fn.criterion)

    call: Callable[[], Any] = funcamp_step(size, device, torch.bfloat16, config=UNSCALED, change=in_float8)
    return torch_variant(call, device)


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = arguments(__doc__)
    args = parser.parse_args()
    columns = {
        "size": "size",
        "products": "variant",
        "median ms": "median_ms",
        "quartiles ms": "quartiles_ms",
        "over bfloat16": "ratio",
        "host ms": "host_ms",
        "first call s": "first_call_s",
    }
    facts = about(args.device, rounds=args.rounds)
    report = Report(args.out, f"float8-speed-{args.device}", "Float8 against bfloat16", facts, columns)
    for name, size in chosen(parser, args, GPU_SIZES if args.device == "cuda" else CPU_SIZES).items():
        make = product if size.kind == "product" else step
        makers = {kind: functools.partial(make, size, args.device, kind) for kind in CONFIGS}
        report.add(measured(name, makers, size.steps, args.rounds, args.device))


if __name__ == "__main__":
    main()
