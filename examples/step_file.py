"""Train in one process, save the compiled step, and go on in another process that has no code of the model.

    python examples/step_file.py [--steps 40] [--out demo-out/step_file]

The second process imports funcamp and this file's `serve` only: it reads batches from its standard input, trains on
each, and prints the loss. A device that fine-tunes, or a job that is restarted, does the same.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import time
from pathlib import Path

import torch

import funcamp

BATCH, WIDTH = 32, 16


def batches(first: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches of a task that a small network learns: the sign of a product."""
    made = []
    for number in range(first, first + count):
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))
        made.append((x, (x[:, 0] * x[:, 1] > 0).long()))
    return made


def train(steps: int, path: Path) -> float:
    """Train a model from the start, and write the compiled step with its state to a file."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 64), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 2)
    )
    loss_fn = funcamp.module_loss(model, torch.nn.functional.cross_entropy)
    step = funcamp.make_train_step(loss_fn, funcamp.stateless(torch.optim.AdamW, lr=3e-3))
    run = funcamp.jit(step)
    state = step.init()
    for batch in batches(0, steps):
        state, metrics = run(state, batch)
    run.save(path, example_state=state)
    return float(metrics.loss)


def serve(path: str) -> None:
    """Train on the batches of the standard input, given a file; print the loss of each."""
    start = time.perf_counter()
    run = funcamp.load_step(path)
    state = run.example_state
    for number, batch in enumerate(torch.load(io.BytesIO(sys.stdin.buffer.read()))):
        state, metrics = run(state, batch)
        if number == 0:
            seconds = time.perf_counter() - start
            print(f"loaded, and the first step taken, in {seconds:.2f} s", file=sys.stderr)
        print(f"{metrics.loss.item():.6f}")


def main() -> None:
    """Train, and go on in another process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="steps in each of the two processes")
    parser.add_argument("--out", type=Path, default=Path("demo-out", "step_file"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "step.pt"
    loss = train(args.steps, path)
    print(f"this process trained to a loss of {loss:.4f} and wrote {path}, {path.stat().st_size / 1e6:.1f} MB")
    sent = io.BytesIO()
    torch.save(batches(args.steps, args.steps), sent)
    server = "import sys; from step_file import serve; serve(sys.argv[1])"
    command = [sys.executable, "-c", server, str(path.resolve())]
    result = subprocess.run(
        command, input=sent.getvalue(), stdout=subprocess.PIPE, check=True, cwd=Path(__file__).parent
    )
    losses = result.stdout.decode().split()
    print(f"another one, without the model, went on from there: {losses[0]} to {losses[-1]}")


if __name__ == "__main__":
    main()
