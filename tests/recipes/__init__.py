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

FOLDER = Path(__file__).parent.parent.parent / "examples" / "recipes"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
Trace = list[tuple[Any, Any]]


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


def scaler_for(config: Any, device: str) -> torch.amp.GradScaler:
    """torch's scaler with a configuration's numbers."""
    return torch.amp.GradScaler(
        device, config.init_scale, config.growth_factor, config.backoff_factor, config.growth_interval
    )


def advance(scaler: torch.amp.GradScaler) -> tuple[float, float]:
    """Updates the scaler; the scale of the step that ends, and whether a gradient of it was not finite."""
    before = scaler.get_scale()
    scaler.update()
    return before, float(scaler.get_scale() < before)


def nothing(*_: object) -> None:
    pass


def amp_loop(
    recipe: Any,
    optimizer: torch.optim.Optimizer,
    steps: int,
    device: str,
    loss_of: Callable[..., Tensor],
    *,
    unscaled: Callable[[torch.amp.GradScaler], object] = nothing,
    applied: Callable[[], object] = nothing,
) -> Trace:
    """Train as torch's automatic mixed precision examples do.

    loss_of: the loss of what is in a batch.
    unscaled: is called with the scaler before each step.
    applied: is called after each step that is not skipped.
    """
    scaler, trace = scaler_for(recipe.CONFIG, device), []
    for index in range(steps):
        with torch.autocast(device, torch.float16):
            loss = loss_of(*recipe.batch(index, device))
        scaler.scale(loss).backward()
        unscaled(scaler)
        scaler.step(optimizer)
        trace.append(advance(scaler))
        if not trace[-1][1]:
            applied()
        optimizer.zero_grad()
    return trace


def values(model: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters of a module, detached."""
    return {name: value.detach() for name, value in model.named_parameters()}
