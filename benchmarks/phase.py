"""Scaler, clip and optimizer alone: how near to the speed of memory?

The gradients are there already, as the backward pass leaves them; one iteration unscales and checks them, clips by
norm, takes an AdamW step and updates the scale. That must move 30 bytes a parameter: the low-precision gradient is read
for the check (2), then it, the parameter and two moments for the step (14), which writes parameter, moments and the
low-precision copy (14). torch's loop holds float32 gradients and moves more. Bandwidth is 30 bytes a parameter over the
time, whatever a variant really moved, beside what `copy_` reaches for as many bytes in the same run.

    python benchmarks/phase.py [--device cuda] [--rounds 9] [--sizes "10 M in 100;..."]
        [--variants "funcamp.jit, flat;..."] [--out DIR]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from _timing import Report, Row, Variant, about, arguments, chosen, measured, named, torch_variant
from torch import Tensor

import funcamp
from funcamp._step.flag_and_norm import flag_and_norm, unscaled_gradients

BYTES = 2 + 14 + 14  # a parameter
LR = 1e-4
MAX_NORM = 1.0


class Size(NamedTuple):
    """Parameters, in so many tensors, and the repeats of one timing."""

    elements: int
    tensors: int
    repeats: int


CPU_SIZES = {
    "1 M in 10": Size(10**6, 10, 40),
    "1 M in 1,000": Size(10**6, 1000, 10),
    "10 M in 100": Size(10**7, 100, 8),
    "40 M in 300": Size(4 * 10**7, 300, 3),
    "10 M in 10,000": Size(10**7, 10_000, 2),
}
GPU_SIZES = {
    "1 M in 10": Size(10**6, 10, 200),
    "10 M in 100": Size(10**7, 100, 200),
    "10 M in 10,000": Size(10**7, 10_000, 20),
    "124 M in 148": Size(124 * 10**6, 148, 100),
    "1,000 M in 300": Size(10**9, 300, 20),
}


def shapes(size: Size) -> list[int]:
    """Elements of every tensor."""
    return [size.elements // size.tensors] * size.tensors


def torch_iteration(size: Size, device: str, *, scaler: Any, compiled: bool = False, **options: Any) -> Variant:
    """unscale_, clip_grad_norm_, step, update, with float32 gradients as autocast leaves them."""
    params = [torch.nn.Parameter(torch.randn(n, device=device)) for n in shapes(size)]
    optimizer = torch.optim.AdamW(params, lr=LR, **options)
    if compiled:
        optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    scaler.scale(torch.zeros((), device=device))
    for param in params:
        param.grad = torch.randn_like(param)

    def call() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()

    return torch_variant(call, device)


def funcamp_iteration(size: Size, device: str, dtype: torch.dtype, *, flat: bool = True) -> Variant:
    """The step builder's arithmetic, by `funcamp.jit`: check and norm, unscale and clip in AdamW, select, update."""
    config = funcamp.ScalerConfig(1.0, growth_interval=10**6)
    adamw = funcamp.stateless(torch.optim.AdamW, lr=LR)
    clipped = funcamp.chain(funcamp.clip_by_norm(MAX_NORM), adamw)
    tree: Any = {f"p{index}": torch.randn(n, device=device) for index, n in enumerate(shapes(size))}
    params = funcamp.ravel(tree) if flat else tree
    grads = torch.utils._pytree.tree_map(lambda p: torch.randn_like(p).to(dtype), params)

    def step(state: Any, _: Any) -> tuple[Any, Tensor]:  # a batch would be copied into a captured step
        params, opt_state, scaler, _ = state
        checked, norm = flag_and_norm(scaler, grads)
        update = funcamp.Update(params, unscaled_gradients(scaler, grads), norm)
        update, new_opt_state = clipped.transform(update, opt_state)
        params, opt_state = funcamp.skip_step(checked, new=(update.params, new_opt_state), old=(params, opt_state))
        low = torch.utils._pytree.tree_map(lambda p: p.to(dtype), params)
        return (params, opt_state, funcamp.update(checked, config), low), norm

    low = torch.utils._pytree.tree_map(lambda p: p.to(dtype), params)
    run = funcamp.jit(step)
    state = [(funcamp.clone(params), adamw.init(params), funcamp.init(config, device=torch.device(device)), low)]

    def call() -> None:
        state[0], _ = run(state[0], ())

    return torch_variant(call, device)


def copy(size: Size, device: str) -> Variant:
    """A plain copy that moves as many bytes: half of them read, half written."""
    source = torch.zeros(size.elements * BYTES // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return torch_variant(lambda: target.copy_(source), device)


def makers(size: Size, device: str, dtype: torch.dtype) -> dict[str, Callable[[], Variant]]:
    """By name; the copy first."""

    def of_torch(make: Any = torch.amp.GradScaler, **options: Any) -> Callable[[], Variant]:
        return lambda: torch_iteration(size, device, scaler=make(device, 1.0, growth_interval=10**6), **options)

    found = {
        "copy": lambda: copy(size, device),
        "torch, fused AdamW": of_torch(fused=True),
        "torch, foreach AdamW": of_torch(foreach=True),
        "funcamp.GradScaler, fused AdamW": of_torch(funcamp.GradScaler, fused=True),
        "funcamp.jit, flat": lambda: funcamp_iteration(size, device, dtype),
    }
    if size.tensors <= 300:
        options = {"capturable": True} if device == "cuda" else {}
        found["torch, compiled AdamW"] = of_torch(compiled=True, **options)
    if size.tensors <= 100:
        found["funcamp.jit, a tensor a parameter"] = lambda: funcamp_iteration(size, device, dtype, flat=False)
    return found


def launches(variant: Variant) -> Row:
    """Kernels and copies of one call on a GPU."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            variant.call()
            variant.wait()
    except RuntimeError as error:  # some machines let no profiler near the GPU: the times count without
        return {"launches": f"not counted: {type(error).__name__}"}
    count = sum("CUDA" in str(event.device_type) for event in profile.events() or [])
    return {"launches": count or "not counted: no events"}


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = arguments(__doc__)
    parser.add_argument("--variants", help="names of variants beside the copy, separated by semicolons")
    args = parser.parse_args()
    dtype = torch.float16 if args.device == "cuda" else torch.bfloat16
    columns = {
        "parameters in tensors": "size",
        "variant": "variant",
        "median ms": "median_ms",
        "quartiles ms": "quartiles_ms",
        "GB/s": "GB_per_s",
        "of copy": "share_of_copy",
        "host ms": "host_ms",
    }
    facts = about(args.device, rounds=args.rounds, **{"bytes a parameter": BYTES})
    title = "Scaler, clip and optimizer"
    report = Report(args.out, f"phase-{args.device}", title, facts, columns | {"launches": "launches"})
    inspect: dict[str, Any] = {"inspect": launches} if args.device == "cuda" else {}
    sizes = chosen(parser, args, GPU_SIZES if args.device == "cuda" else CPU_SIZES)
    known = {label for size in sizes.values() for label in makers(size, args.device, dtype)}
    wanted = named(parser, "--variants", args.variants, sorted(known))
    for name, size in sizes.items():
        made = makers(size, args.device, dtype)
        made = {label: make for label, make in made.items() if label in ("copy", *wanted)}
        for row in measured(name, made, size.repeats, args.rounds, args.device, **inspect):
            if "median_ms" in row:
                row["GB_per_s"] = round(size.elements * BYTES / row["median_ms"] / 1e6, 1)
            if "ratio" in row:
                row["share_of_copy"] = round(1 / row["ratio"], 2)
            report.add([row])


if __name__ == "__main__":
    main()
