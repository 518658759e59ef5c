"""What does `funcamp.verify` say of captured steps on a GPU?

An MLP, a GPT of 124 M parameters and timm's ResNet-50, in float16 with AdamW and clipping, by `funcamp.jit` as
users call it. Three steps, from the highest scale at which the first is not skipped.

    python benchmarks/gpu_verify.py [--device cuda] [--sizes "ResNet-50;..."] [--out DIR]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from _models import GPU_SIZES, build, cross_entropy
from _public import PUBLIC_GPU_SIZES, public_task
from _timing import Report, Row, about, arguments, chosen
from _verified import verified
from torch import Tensor, nn

STEPS = 3
Task = tuple[nn.Module, Callable[..., Tensor], list[Any]]


def of_these_benchmarks(name: str, device: str) -> Task:
    """A model of step.py, with its batch in another order every time."""
    model, x, y = build(GPU_SIZES[name], device)
    return model, cross_entropy, [(x, y.roll(shift, 0)) for shift in range(STEPS)]


def resnet(device: str) -> Task:
    """ResNet-50 on 16 images of 224 x 224, in another order every time."""
    size = PUBLIC_GPU_SIZES["ResNet-50 24 M"]._replace(batch=16)
    model, (images, labels), _ = public_task(size, device)
    return model, cross_entropy, [(images, labels.roll(shift, 0)) for shift in range(STEPS)]


MODELS: dict[str, Callable[[str], Task]] = {
    "MLP 0.14 M": lambda device: of_these_benchmarks("MLP 0.14 M", device),
    "ResNet-50": resnet,
    "GPT 124 M, 1,024 tokens": lambda device: of_these_benchmarks("GPT 124 M, 1,024 tokens", device),
}


def failure(error: Exception) -> str:
    """An error in a cell."""
    return f"{type(error).__name__}: {str(error)[:300]}"


def main() -> None:
    """Run all, and write what is known after each."""
    parser = arguments(__doc__)
    args = parser.parse_args()
    columns = {
        "model": "size",
        "dtype": "variant",
        "agrees": "ok",
        "eager step to torch's loop": "eager",
        "captured to eager": "compiled",
        "captured, saved and loaded, to eager": "saved",
        "seconds": "seconds",
    }
    facts = about(args.device, steps=STEPS)
    report = Report(args.out, f"verify-{args.device}", "What verify says of captured steps", facts, columns)
    for name, make in chosen(parser, args, MODELS).items():
        row: Row = {"size": name, "variant": "float16"}
        report.add([verified(row, partial(make, args.device), STEPS, ("eager", "compiled", "saved"), failure)])


if __name__ == "__main__":
    main()
