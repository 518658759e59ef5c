"""A numerics report as text: a tree of modules, sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from torch import nn

from funcamp.numerics.record import Record
from funcamp.report.numbers.operation import Operation

#: An operation as numbers and strings by name: a row of `NumericsReport.to_rows`.
Row: TypeAlias = dict[str, Any]


def power(scale: float) -> str:
    """Format a loss scale with its power of two."""
    exponent = math.log2(scale)
    is_exact_integer = 1 <= scale < 2**53 and scale.is_integer()
    number = f"{scale:.0f}" if is_exact_integer else f"{scale:g}"
    return f"{number} (2^{exponent:.0f})" if exponent.is_integer() else number


def no_scale_helps(operation: Operation, cause: str) -> str:
    """Return the sentence for a loss or gradients that are non-finite at every loss scale."""
    if operation.backward:
        what = "gradients are inf or NaN at every loss scale"
    else:
        what = "loss is inf or NaN before it is scaled"
    change = "keep it from dividing by zero, and from a root or logarithm of zero"
    if operation.needs_loss_scaling:
        change = f"compute it in float32 or bfloat16, make what goes into it smaller, or {change}"
    return f"No loss scale helps: the {what}: {cause}. Change that operation: {change}."


def annotate(module: nn.Module | None, records: Mapping[str, Record]) -> str:
    """Return a module's tree with the standard deviations of each part's output and of its gradient.

    Format: `(-> 0.573, <- 0.000296)`, n/a if there is none. Reads the records on the host: a sync.

    Args:
        module: the module; None for the records only.
        records: by path, as in a tracked step's metrics: scaled, unless `Record.unscale` was called.

    Raises:
        AttributeError: records contains something else than a `Record`.

    Example:
        >>> print(annotate(torch.nn.Sequential(torch.nn.ReLU()), {}))
        Sequential
          (0): ReLU
    """
    if module is None:
        return "\n".join(f"{path or '(module)'}  {record}" for path, record in records.items())
    lines = list(_tree_lines(module, records))
    paths_in_module = {path for path, _ in module.named_modules()}
    for path, record in records.items():
        if path not in paths_in_module:
            lines.append((path, str(record)))
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}}  {record}".rstrip() for name, record in lines)


def _tree_lines(
    module: nn.Module, records: Mapping[str, Record], path: str = "", label: str = "", depth: int = 0
) -> Iterator[tuple[str, str]]:
    """Yield the name and the record of a module and of everything below it, indented as `print(module)` does."""
    name = type(module).__name__
    extra = module.extra_repr()
    if extra and "\n" not in extra:
        name = f"{name}({extra})"
    record = str(records[path]) if path in records else ""
    yield "  " * depth + label + name, record
    for child_name, child in module.named_children():
        child_path = f"{path}.{child_name}" if path else child_name
        yield from _tree_lines(child, records, child_path, f"({child_name}): ", depth + 1)
