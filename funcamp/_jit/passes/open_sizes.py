"""Check what a trace assumed of sizes that follow from values, such as that of `logits[mask]`: open sizes.

A trace is made for sizes that are equal to each other where tensors meet, and not 1. If a call selects a single row,
eager code would repeat it, and sum its gradients; the program would not. So every open result must have the shape of
the trace, in which each unknown size has one value a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcamp._jit.passes.program import Pass, Program
from funcamp._trace.open_shapes import is_open

#: A formula of sympy, which has no types: what a size that follows from values is in a trace.
_Formula: TypeAlias = Any


def check_open_sizes(program: Program) -> Program:
    """Return a program that checks its open results, one by one."""
    graph = program.module.graph
    open_nodes = [node for node in graph.nodes if is_open(node.meta.get("val"))]
    first_operation = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first_operation):
        known_sizes = graph.call_function(dict)  # by symbol; new at each call
    for node in open_nodes:
        traced = node.meta["val"]
        if not isinstance(traced, (Tensor, torch.SymInt)):
            continue
        with graph.inserting_after(node):
            checked = graph.call_function(_check_of(traced), (known_sizes, node))
        checked.meta = dict(node.meta)
        node.replace_all_uses_with(checked, delete_user_cb=lambda user, checked=checked: user is not checked)
    return program


def _check_of(traced: Tensor | torch.SymInt) -> Callable[[dict[_Formula, int], Any], object]:
    """Return a function that compares an open result, a tensor or a size, with the trace, and returns it."""
    traced_sizes = traced.shape if isinstance(traced, Tensor) else [traced]
    traced_shape = [size.node.expr if isinstance(size, torch.SymInt) else size for size in traced_sizes]

    def check(known_sizes: dict[_Formula, int], value: Any) -> object:
        _compare(known_sizes, traced_shape, value.shape if isinstance(value, Tensor) else [value])
        return value

    return check


def _compare(known_sizes: dict[_Formula, int], traced_shape: Sequence[int | _Formula], shape: Sequence[int]) -> None:
    """Compare a shape with the trace's, and note sizes that are new.

    Raises:
        RuntimeError: they differ.
    """
    for traced_size, size in zip(traced_shape, shape):
        if isinstance(traced_size, int):
            expected = traced_size
        elif traced_size.is_Symbol:
            expected = known_sizes.setdefault(traced_size, size)
        else:
            formula = traced_size.subs(known_sizes)
            expected = int(formula) if formula.is_Integer else size  # with further symbols any
        if expected != size:
            raise RuntimeError(
                f"jit: a tensor of shape {tuple(shape)} must have size {expected} instead of {size}, because step was "
                "traced for equal sizes where tensors meet: a single selected row is not repeated, as in eager mode"
            )


PASS = Pass(
    name="open_sizes",
    why="a trace assumes that sizes which follow from values are equal where tensors meet, and not 1",
    evidence="tests/jit/test_open_shapes.py",
    where=lambda target: target.is_open and target.backend == "eager",
    run=check_open_sizes,
)
