"""The checkpoint, the progress bar and the picture of train_gpt.py."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from funcamp import load, save

try:
    import rich.progress as rich_progress
except ImportError as error:
    raise SystemExit("train_gpt: the progress bar needs rich: pip install 'funcamp[demo,plot]'") from error

#: A run resumes only if these are unchanged; --total comes from the checkpoint.
MUST_AGREE = ("batch", "context", "width", "layers", "heads", "lr", "seed", "eval_every", "init_scale")


def save_checkpoint(file: Path, state: dict[str, Any], history: dict[str, Any], args: argparse.Namespace) -> None:
    """Write tensors and numbers in plain dicts; if it is killed, the last checkpoint remains."""
    saved = {
        "state": state,
        "history": history,
        "args": {name: getattr(args, name) for name in (*MUST_AGREE, "total")},
    }
    save(saved, file)


def load_checkpoint(file: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Read a checkpoint of a run with the same arguments, and set args.total to its value."""
    try:
        saved = load(file)
        given, _ = saved["args"], [saved[key] for key in ("state", "history")]
    except FileNotFoundError:
        raise SystemExit(f"train_gpt: --resume needs a checkpoint; there is none at {file}") from None
    except KeyError as error:
        raise SystemExit(f"train_gpt: {file} is no checkpoint of this program; it lacks {error}") from None
    except Exception as error:  # torch.load raises many kinds
        raise SystemExit(f"train_gpt: {file} is no checkpoint of this program\n{error}") from None
    for name in MUST_AGREE:
        if given[name] != getattr(args, name):
            raise SystemExit(
                f"train_gpt: --{name.replace('_', '-')} must be as in the checkpoint, {given[name]}; "
                f"got {getattr(args, name)}"
            )
    args.total = given["total"]
    return saved


class Progress:
    """A bar with the loss, the validation loss, the scale and the skipped steps."""

    def __init__(self, first: int, last: int) -> None:
        columns = (
            rich_progress.TextColumn("step {task.completed}/{task.total}"),
            rich_progress.BarColumn(),
            rich_progress.TextColumn("{task.description}"),
            rich_progress.TimeRemainingColumn(),
        )
        self._bar = rich_progress.Progress(*columns)
        self._task = self._bar.add_task("", total=last, completed=first)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, history: dict[str, Any]) -> None:
        """Move to the state in the history."""
        if not history["loss"]:
            return
        scale = history["scale"][-1]
        text = (
            f"loss {history['loss'][-1]:.3f}  held-out {history['held_out'][-1][1]:.3f}  "
            f"scale {f'2^{math.log2(scale):g}' if scale > 0 else '0'}  skipped {sum(history['found_inf']):.0f}"
        )
        self._bar.update(self._task, completed=len(history["loss"]), description=text)


def plot(file: Path, history: dict[str, Any]) -> str:
    """Draw losses, scale and skipped steps; return the picture's path, or why there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture (pip install 'funcamp[plot]')"
    steps = range(1, len(history["loss"]) + 1)
    skipped = [step for step, found in zip(steps, history["found_inf"]) if found]
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    losses, scales = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    losses.plot(steps, history["loss"], color="tab:gray", linewidth=0.8, label="training batch")
    losses.plot(*zip(*history["held_out"]), color="tab:blue", marker="o", markersize=3, label="held out")
    losses.set_ylabel("loss (nats a byte)")
    losses.legend()
    scales.step(steps, history["scale"], where="post", color="tab:green", label="scale")
    scales.plot(skipped, [history["scale"][step - 1] for step in skipped], "x", color="tab:red", label="skipped step")
    scales.set_yscale("log", base=2)
    scales.set_ylabel("loss scale")
    scales.set_xlabel("step")
    scales.legend()
    figure.savefig(file, dpi=110)
    return str(file)
