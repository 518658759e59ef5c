"""Every recipe's loop as one would write it with torch.autocast and torch.amp.GradScaler: what its example must equal.

A module here has the name of an example in examples/recipes, an `oracle(recipe, steps, device)` that returns the
parameters and, for every step, (scale, found_inf) as that loop has them, and a TOLERANCE for the parameters, relative
to their norm.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from tests.support.torch_loop import Scaled

FOLDER = Path(__file__).parent.parent.parent / "examples" / "recipes"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
Trace = list[tuple[Any, Any]]
#: What an oracle returns: parameters, and the trace.
Outcome = tuple[Any, Trace]


def example(name: str) -> Any:
    """The example's module, loaded once."""
    full = f"recipes_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return sys.modules[full]


def oracle(name: str) -> Any:
    """The module in this folder that states what the example must equal."""
    return importlib.import_module(f"tests.recipes.{name}")


def trace_of(history: list[Any]) -> Trace:
    """(scale, found_inf) of every step, as numbers; as lists where it has several rows, or a row several scalers."""
    return [(_numbers(row, "scale"), _numbers(row, "found_inf")) for row in history]


def _numbers(row: Any, name: str) -> Any:
    return getattr(row, name).tolist() if hasattr(row, name) else [_numbers(part, name) for part in row]


def uncompiled(step: Any, unroll: int | None = None) -> Any:
    """A step as it is, in the place of `jit`: with unroll, calls in turn and their metrics stacked."""
    if unroll is None:
        return step

    def run(state: Any, batch: Any) -> tuple[Any, Any]:
        rows = []
        for index in range(unroll):
            state, row = step(state, _pytree.tree_map(lambda leaf: leaf[index], batch))  # noqa: B023
            rows.append(row)
        return state, _pytree.tree_map(lambda *leaves: torch.stack(leaves), *rows)

    return run


def row_of(*rows: tuple[float, float]) -> tuple[list[float], list[float]]:
    """A step's row of several scalers."""
    return [scale for scale, _ in rows], [found for _, found in rows]


def nothing() -> None:
    pass


def amp_loop(
    recipe: Any,
    optimizer: torch.optim.Optimizer,
    steps: int,
    device: str,
    loss_of: Callable[..., Tensor],
    *,
    config: Any = None,
    max_norm: float | None = None,
    applied: Callable[[], object] = nothing,
) -> Trace:
    """Train as torch's automatic mixed precision examples do.

    loss_of: the loss of what is in a batch.
    config: of the scaler, if it is not the recipe's.
    applied: is called after each step that is not skipped.
    """
    scaled, trace = Scaled(optimizer, config or recipe.CONFIG, device), []
    for index in range(steps):
        with torch.autocast(device, torch.float16):
            loss = loss_of(*recipe.batch(index, device))
        trace.append(scaled.take(loss, max_norm=max_norm))
        if not trace[-1][1]:
            applied()
    return trace


def move(target: torch.nn.Module, model: torch.nn.Module, rate: float) -> None:
    """Move a target network; as everything else, it rests in a skipped step."""
    for old, new in zip(target.parameters(), model.parameters()):
        old.data.lerp_(new.data, rate)


def values(model: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters of a module, detached."""
    return {name: value.detach() for name, value in model.named_parameters()}
