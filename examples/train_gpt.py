"""Train a byte-level GPT in float16 on the Python standard library's own sources.

Watch the scale: it starts so high that the first steps overflow. Each overflow halves it and skips the step; after some
clean steps it grows again. The step is `make_step`; everything else loads data and reports.

    python examples/train_gpt.py                     about a minute on two CPU cores
    python examples/train_gpt.py --resume            resume from the checkpoint, bit for bit
    python examples/train_gpt.py --size large --device cuda --steps 5000
    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py     the same batches, each split over two processes
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _gpt import GPT, batch_at, load_bytes
from _processes import check_processes, join, launched, leave, part_of
from _report import Progress, load_checkpoint, plot, save_checkpoint
from torch import Tensor

import funcamp
from funcamp import distributed

SIZES = {
    "small": {"batch": 8, "context": 64, "width": 64, "layers": 2, "heads": 4},
    "medium": {"batch": 32, "context": 256, "width": 384, "layers": 6, "heads": 6},
    "large": {"batch": 64, "context": 512, "width": 768, "layers": 12, "heads": 12},
}
WARMUP = 30
GROWTH_INTERVAL = 50
TIMEOUT = 600.0  # seconds that one process waits for another: compile times differ, and rank 0 saves and plots


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean, in nats per byte."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def make_step(
    model: GPT,
    config: funcamp.ScalerConfig,
    lr: float,
    total: int,
    parallel: distributed.DataParallel | None = None,
) -> funcamp.TrainStep:
    """Return the training step: a pure function of tensors that never reads one on the host."""
    adamw = {
        group: funcamp.stateless(torch.optim.AdamW, lr=make_schedule(lr, total), betas=(0.9, 0.98), weight_decay=decay)
        for group, decay in {"matrix": 0.1, "vector": 0.0}.items()
    }
    loss_fn = funcamp.module_loss(model, cross_entropy)
    options: Any = {"policy": "float16", "max_norm": 1.0, "parallel": parallel}
    return funcamp.make_train_step(loss_fn, funcamp.by_group(adamw), config, **options)


def make_schedule(peak: float, total: int) -> Callable[[Tensor], Tensor]:
    """Return a schedule of applied steps: linear warm-up, then a cosine to a tenth."""

    def schedule(applied: Tensor) -> Tensor:
        warm = (applied + 1) / WARMUP
        cosine = 0.55 + 0.45 * torch.cos(torch.pi * (applied / total).clamp(max=1.0))
        return peak * torch.minimum(warm, cosine)

    return schedule


def evaluate(step: funcamp.TrainStep, state: funcamp.TrainState, text: Tensor, args: argparse.Namespace) -> float:
    """Return the loss on fixed validation windows."""
    losses = [
        step.loss(state, batch_at(text, index, 7, args.batch, args.context, args.device)).item() for index in range(8)
    ]
    return float(sum(losses) / len(losses))


def generate(model: Any, prompt: bytes, length: int, seed: int, device: str) -> str:
    """Sample bytes after a prompt."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(length):
        window = torch.tensor([tokens[-model.context :]], device=device)
        logits = model(window)[0, -1].float().cpu()
        tokens.append(int(torch.multinomial(torch.softmax(logits / 0.8, 0), 1, generator=generator)))
    return bytes(tokens).decode("utf-8", "replace")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the checked options."""
    parser = argparse.ArgumentParser("train_gpt", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small", help="presets for the next five")
    for name in SIZES["small"]:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--steps", type=int, default=600, help="steps to take in this run")
    parser.add_argument("--total", type=int, help="steps of the learning rate's schedule (default: --steps)")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--init-scale", type=float, default=2.0**24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on a GPU only")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where checkpoint and picture go")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    args = parser.parse_args(argv)
    for name, value in SIZES[args.size].items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    args.total = args.steps if args.total is None else args.total
    for name in (*SIZES["small"], "steps", "total", "lr", "eval_every"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be positive; got {getattr(args, name)}")
    if args.width % args.heads:
        parser.error(f"--width must be a multiple of --heads; got {args.width} and {args.heads}")
    if args.device not in ("cpu", "cuda"):
        parser.error(f"--device must be cpu or cuda; got {args.device!r}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that this torch can use; got none")
    check_processes(parser, args)
    if args.compile is None:
        args.compile = args.device == "cuda"
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out must be a folder that can be written; got {args.out} ({error.strerror})")
    if not os.access(args.out, os.W_OK):
        parser.error(f"--out must be a folder that can be written; got {args.out}")
    try:
        args.config = funcamp.ScalerConfig(init_scale=args.init_scale, growth_interval=GROWTH_INTERVAL)
    except ValueError as error:
        parser.error(f"--init-scale: {error}")
    return args


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, report, and return the summary's numbers; with the other processes if torchrun started them."""
    args = parse(argv)
    if not launched():
        return train(args)
    rank, world = join(args.device, TIMEOUT)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere if rank else sys.stdout):
        numbers = train(args, rank, world, distributed.DataParallel())
    leave()
    return numbers


def train(
    args: argparse.Namespace, rank: int = 0, world: int = 1, parallel: distributed.DataParallel | None = None
) -> dict[str, float]:
    """Train and report; only rank 0 writes files."""
    began = time.perf_counter()
    train_text, held_out_text = load_bytes()
    torch.manual_seed(args.seed)
    model = GPT(args.context, args.width, args.layers, args.heads)
    history: dict[str, list[Any]] = {"loss": [], "scale": [], "found_inf": [], "held_out": []}
    file = args.out / "checkpoint.pt"
    if args.resume:
        saved = load_checkpoint(file, args)  # first, because it also sets --total
        history = saved["history"]
        # If the run ended between two evaluations, an uninterrupted run would not have its last one.
        history["held_out"] = [entry for entry in history["held_out"] if entry[0] % args.eval_every == 0]
    step = make_step(model.to(args.device), args.config, args.lr, args.total, parallel)
    state = step.init(consume=True)
    if args.resume:
        state = step.load_state_dict(saved["state"], like=state)
    compiled = funcamp.jit(step) if args.compile else None
    run = compiled or step

    first = len(history["loss"])
    reader = funcamp.MetricReader()

    def log(rows: list[funcamp.Metrics]) -> None:
        for row in rows:
            for name in ("loss", "scale", "found_inf"):
                history[name].append(getattr(row, name))

    def held_out() -> None:
        history["held_out"].append((first + taken, evaluate(step, state, held_out_text, args)))

    taken = 0
    if not history["held_out"]:
        held_out()
    stops: list[int] = []
    # Finish the step, then save; several processes would stop at different steps.
    before = signal.signal(
        signal.SIGINT, (lambda *_: stops.append(taken)) if parallel is None else signal.default_int_handler
    )
    try:
        with Progress(first, first + args.steps) as progress:
            while taken < args.steps and not stops:
                batch = batch_at(train_text, first + taken, args.seed, args.batch, args.context, args.device)
                state, metrics = run(state, part_of(batch, rank, world))
                taken += 1
                reader.put(metrics)
                log(reader.ready())
                if (first + taken) % args.eval_every == 0 or taken == args.steps:
                    held_out()
                progress.show(history)
    finally:
        signal.signal(signal.SIGINT, before)
    log(reader.drain())
    if compiled is not None:
        compiled.release()  # NCCL's group does not end while a CUDA graph that contains its collectives exists
    picture = ""
    if rank == 0:
        save_checkpoint(file, step.state_dict(state), history, args)
        picture = plot(args.out / "train_gpt.png", history)
    seconds = time.perf_counter() - began
    steps_done, skipped = len(history["loss"]), int(sum(history["found_inf"]))
    print(f"held-out loss    {history['held_out'][0][1]:.3f} -> {history['held_out'][-1][1]:.3f} nats a byte")
    print(f"steps            {steps_done}, of them skipped {skipped}; scale now 2^{state.scaler.scale.log2().item():g}")
    print(f"time             {seconds:.0f} s, {taken / seconds:.1f} steps a second")
    print(f"files            {file}, {picture}")
    if stops:
        print(f"stopped; go on with --resume --out {args.out}")
    else:
        with step.evaluating(state) as trained, step.autocast(state):
            print("sample\n" + generate(trained, b"def ", 200, args.seed, args.device))
    return {
        "held_out_first": history["held_out"][0][1],
        "held_out_last": history["held_out"][-1][1],
        "steps": steps_done,
        "skipped": skipped,
        "scale": state.scaler.scale.item(),
        "seconds": seconds,
    }


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # so that a file has each line at once
    main()
