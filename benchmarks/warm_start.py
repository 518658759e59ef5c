"""Does `presets.warm_start` find the scale sooner, and with fewer lost steps, than the rules it could replace?

Two small models trained in float16 from several initial scales. A step is lost where it is skipped. The scale is found
once it is at the largest power of two that does not overflow, or next to it: what that is at a step is found by trying
scales on the step's own batch and parameters. Eager, on a CPU; not timed, so it needs no quiet machine.

    python benchmarks/warm_start.py [--steps 40] [--out benchmarks/results]
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _timing import Report, about, arguments, chosen
from torch import Tensor

import funcamp
from funcamp import ScalerConfig, presets

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import _gpt

EXPONENTS = (8, 16, 24, 32)
RULES: dict[str, Callable[[float], ScalerConfig]] = {
    "torch": lambda scale: ScalerConfig(scale),
    "megatron": lambda scale: presets.megatron(scale),
    "doubling from the start": lambda scale: ScalerConfig(scale, growth_interval=1),
    "warm_start": presets.warm_start,
}


class Task:
    """A model, its loss and its batches."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self._batch: Callable[[int], tuple[Tensor, Tensor]]
        if kind == "MLP":
            layers = [layer for _ in range(3) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
            self.model: torch.nn.Module = torch.nn.Sequential(*layers, torch.nn.Linear(64, 8))
            data = torch.randn(512, 64)
            teacher = torch.randn(64, 8) / 8
            self._batch = lambda index: (data[index % 16 * 32 :][:32], (data @ teacher)[index % 16 * 32 :][:32])
            self._loss: Callable[[Tensor, Tensor], Tensor] = torch.nn.functional.mse_loss
        else:
            self.model = _gpt.GPT(layers=2, width=32, heads=2, context=32)
            train, _ = _gpt.load_bytes(200_000)
            self._batch = lambda index: (
                torch.stack([train[i * 997 + index * 31 :][:32] for i in range(4)]).long(),
                torch.stack([train[i * 997 + index * 31 + 1 :][:32] for i in range(4)]).long(),
            )
            self._loss = lambda out, y: torch.nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())

    def loss(self, index: int) -> Tensor:
        """The loss of a batch in float16."""
        x, y = self._batch(index)
        with torch.autocast("cpu", torch.float16):
            return self._loss(self.model(x), y)

    def largest(self, index: int) -> int:
        """The exponent of the largest scale that does not overflow at this step."""
        low, high = -20, 40
        while high - low > 1:
            middle = (low + high) // 2
            self.model.zero_grad()
            torch.autograd.backward(self.loss(index) * 2.0**middle)
            clean = all(bool(p.grad.isfinite().all()) for p in self.model.parameters() if p.grad is not None)
            low, high = (middle, high) if clean else (low, middle)
        return low


def run(kind: str, config: ScalerConfig, steps: int) -> dict[str, Any]:
    """Steps lost, and the step from which the scale is within a factor of 2 of the largest clean one."""
    task = Task(kind)
    scaler = funcamp.GradScaler("cpu", config=config)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-3)
    lost = 0
    found = None
    losses: list[float] = []
    for index in range(steps):
        largest = task.largest(index)
        task.model.zero_grad()
        loss = task.loss(index)
        torch.autograd.backward(scaler.scale(loss))
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        lost += int(scaler.metrics().found_inf.item())
        if found is None and scale > 0 and abs(math.log2(scale) - largest) <= 1:
            found = index
    where = "not found" if found is None else found
    mean = round(statistics.mean(losses[-5:]), 3)
    return {"lost": lost, "found": where, "largest": f"2^{largest}", "loss": mean}


def main() -> None:
    """Measure, print, and write the result files where asked."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    facts = about("cpu", precision="float16")
    columns = {
        "model": "size",
        "init_scale": "scale",
        "rule": "variant",
        f"of {args.steps} steps lost": "lost",
        "found at step": "found",
        "mean loss of the last 5": "loss",
        "largest clean scale at the last step": "largest",
    }
    report = Report(args.out, "warm-start-cpu", "Finding the scale", facts, columns)
    for kind in chosen(parser, args, dict.fromkeys(("MLP", "GPT"))):
        for exponent in EXPONENTS:
            for name, rule in RULES.items():
                row = run(kind, rule(2.0**exponent), args.steps)
                report.add([{"size": kind, "variant": name, "scale": f"2^{exponent}", **row}])


if __name__ == "__main__":
    main()
