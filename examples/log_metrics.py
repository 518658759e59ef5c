"""An ordinary loop with funcamp's scaler that logs to CSV and TensorBoard without synchronizing.

    python examples/log_metrics.py            writes demo-out/metrics/metrics.csv
    tensorboard --logdir demo-out/metrics     if tensorboard is installed

Watch the first rows: each step that overflows has found_inf 1 and halves the scale. On a GPU a row is written a
few steps later, when it has arrived, and the device never waits. None is lost: `drain` returns the last ones.
"""

from __future__ import annotations

import contextlib
import csv
from pathlib import Path
from typing import Any

import torch

import funcamp

COLUMNS = ("step", "loss", *funcamp.ScalerState._fields)


class Log:
    """Writes rows as they arrive, to a CSV file and, if installed, to TensorBoard."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "metrics.csv").open("w", newline="")
        self._csv = csv.writer(self._file)
        self._csv.writerow(COLUMNS)
        self.rows: list[tuple[Any, ...]] = []
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._board = None
        else:
            self._board = SummaryWriter(folder)

    def write(self, rows: list[tuple[int, float, funcamp.ScalerState]]) -> None:
        for step, loss, scaler in rows:
            self.rows.append((step, loss, *scaler))
            self._csv.writerow(self.rows[-1])
            if self._board is not None:
                for name, value in zip(COLUMNS[1:], self.rows[-1][1:]):
                    self._board.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def main(steps: int = 400, folder: str | Path = "demo-out/metrics", device: str = "cpu") -> dict[str, float]:
    """Fit a small network from a scale that overflows at first; return the logged values."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = funcamp.GradScaler(device, init_scale=2.0**24, growth_interval=50, skip="select")
    reader, log = funcamp.MetricReader(), Log(Path(folder))
    with contextlib.closing(log):
        for step in range(steps):
            x = torch.randn(32, 8, device=device)
            with torch.autocast(device, torch.float16):
                loss = torch.nn.functional.mse_loss(model(x).float(), x.sin().sum(1, keepdim=True))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            reader.put((step, loss, scaler.metrics()))
            log.write(reader.ready())
        log.write(reader.drain())
    losses, skipped = [row[1] for row in log.rows], sum(row[-1] for row in log.rows)
    assert [row[0] for row in log.rows] == list(range(steps))
    assert sum(losses[-10:]) / 10 < losses[0], losses
    return {"steps": len(losses), "skipped": skipped, "loss_first": losses[0], "loss_last": losses[-1]}


if __name__ == "__main__":
    print(main())
