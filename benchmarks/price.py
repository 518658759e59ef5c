"""What does dynamic scaling cost in a compiled, captured step?

The same model, precision and optimizer three times: without any scaling (the gradients go to AdamW as they are: no
scale, no check, no selection), with funcamp's dynamic scaling, and with that and a flag that the host reads at every
step, as a GradScaler's `step` does. Reported as in step.py, over the step without scaling.

    python benchmarks/price.py [--device cuda] [--rounds 15] [--sizes "GPT 3.3 M;..."] [--out DIR]
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from _models import CPU_SIZES, GPU_SIZES, Size, build, cross_entropy
from _timing import Report, Variant, about, arguments, chosen, measured, torch_variant
from _variants import LR, funcamp_step
from torch import Tensor

import funcamp
from funcamp._step.micro_batch import gradients_as_stored
from funcamp._types import name_of


def unscaled(size: Size, device: str, dtype: torch.dtype) -> Callable[[], Any]:
    """The step builder's step without its scaler."""
    model, x, y = build(size, device)
    loss_fn = funcamp.module_loss(model, cross_entropy)
    adamw = funcamp.stateless(torch.optim.AdamW, lr=LR)
    start = funcamp.make_train_step(loss_fn, adamw, policy=name_of(dtype)).init()
    layout = start.params.layout

    def step(state: Any, batch: tuple[Tensor, Tensor]) -> tuple[Any, Tensor]:
        params, opt_state, buffers = state

        def loss_of(values: list[Tensor]) -> Any:
            with torch.autocast(device, dtype):
                if loss_fn.has_buffers:
                    return loss_fn(layout.tree(values), buffers, batch)
                return loss_fn(layout.tree(values), batch), buffers

        grads, (loss, after) = torch.func.grad_and_value(loss_of, has_aux=True)(params.values())
        params, opt_state = adamw.update(params, gradients_as_stored(grads, layout), opt_state)
        return (params, opt_state, after), loss

    run = funcamp.jit(step)
    state = [(start.params, start.opt_state, start.buffers)]

    def call() -> None:
        state[0], _ = run(state[0], (x, y))

    return call


def read(size: Size, device: str, dtype: torch.dtype) -> Callable[[], Any]:
    """Dynamic scaling, and found_inf read by the host after every step."""
    step = funcamp_step(size, device, dtype)
    return lambda: bool(step().found_inf)


VARIANTS = {"without scaling": unscaled, "dynamic scaling": funcamp_step, "dynamic scaling, read by the host": read}


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = arguments(__doc__, rounds=15)
    args = parser.parse_args()
    dtype = torch.float16 if args.device == "cuda" else torch.bfloat16
    columns = {
        "model": "size",
        "step": "variant",
        "median ms": "median_ms",
        "quartiles ms": "quartiles_ms",
        "over without": "ratio",
        "host ms": "host_ms",
    }
    report = Report(
        args.out, f"price-{args.device}", "The price of scaling", about(args.device, rounds=args.rounds), columns
    )

    def made(make: Any, size: Size) -> Variant:
        return torch_variant(make(size, args.device, dtype), args.device)

    for name, size in chosen(parser, args, GPU_SIZES if args.device == "cuda" else CPU_SIZES).items():
        makers = {label: functools.partial(made, make, size) for label, make in VARIANTS.items()}
        report.add(measured(name, makers, size.steps, args.rounds, args.device))


if __name__ == "__main__":
    main()
