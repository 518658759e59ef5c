"""Check what a trace assumed of sizes that follow from values, such as that of `logits[mask]`: open sizes.

A trace is made for sizes that are equal to each other where tensors meet, and not 1. If a call selects a single row,
eager code would repeat it, and sum its gradients; the program would not. So every open result must have the shape of
the trace, in which each unknown size has one value a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcamp._jit.passes.program import Pass, Program
from funcamp._trace.open_shapes import is_open

#: A formula of sympy, which has no types: what a size that follows from values is in a trace.
_Formula: TypeAlias = Any


class _FoundSizes:
    """The sizes that a call has found so far: by symbol, and for each shape of the trace the last one."""

    def __init__(self) -> None:
        self.by_symbol: dict[_Formula, int] = {}
        self.by_traced_shape: dict[str, Sequence[int]] = {}


def check_open_sizes(program: Program) -> Program:
    """Return a program that checks its open results, one by one."""
    graph = program.module.graph
    open_nodes = [node for node in graph.nodes if is_open(node.meta.get("val"))]
    first_operation = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first_operation):
        sizes = graph.call_function(_FoundSizes)  # new at each call
    for node in open_nodes:
        check = _check_of(node.meta["val"])
        if check is None:
            continue
        with graph.inserting_after(node):
            checked = graph.call_function(check, (sizes, node))
        checked.meta = dict(node.meta)
        node.replace_all_uses_with(checked, delete_user_cb=lambda user, checked=checked: user is not checked)
    return program


def _check_of(traced: object) -> Callable[[_FoundSizes, Any], object] | None:
    """Return a function that compares an open result with the trace, and returns it."""
    if isinstance(traced, torch.SymInt):
        number: _Formula = traced.node.expr

        def check_number(sizes: _FoundSizes, value: int) -> int:
            _compare(sizes, [number], [value])
            return value

        return check_number if number.is_Symbol else None
    if not isinstance(traced, Tensor):
        return None
    traced_shape = [size.node.expr if isinstance(size, torch.SymInt) else size for size in traced.shape]
    name = str(traced_shape)

    def check_shape(sizes: _FoundSizes, value: Tensor) -> Tensor:
        shape = value.shape
        if shape != sizes.by_traced_shape.get(name):
            _compare(sizes, traced_shape, shape)
            sizes.by_traced_shape[name] = shape
        return value

    return check_shape


def _compare(sizes: _FoundSizes, traced_shape: Sequence[int | _Formula], shape: Sequence[int]) -> None:
    """Compare a shape with the trace's, and note sizes that are new.

    Raises:
        RuntimeError: they differ.
    """
    for traced_size, size in zip(traced_shape, shape):
        if isinstance(traced_size, int):
            expected = traced_size
        elif traced_size.is_Symbol:
            expected = sizes.by_symbol.setdefault(traced_size, size)
        else:
            known_symbols = [symbol for symbol in traced_size.free_symbols if symbol in sizes.by_symbol]
            value = _value(traced_size, tuple((symbol, sizes.by_symbol[symbol]) for symbol in known_symbols))
            expected = size if value is None else value
        if expected != size:
            raise RuntimeError(
                f"jit: a tensor of shape {tuple(shape)} must have size {expected} instead of {size}, because step was "
                "traced for equal sizes where tensors meet: a single selected row is not repeated, as in eager mode"
            )


@functools.lru_cache(maxsize=4096)
def _value(size: _Formula, known: tuple[tuple[_Formula, int], ...]) -> int | None:
    """Return the value of a formula; None if it has further symbols."""
    value = size.subs(dict(known))
    return int(value) if value.is_Integer else None


PASS = Pass(
    name="open_sizes",
    why="a trace assumes that sizes which follow from values are equal where tensors meet, and not 1",
    evidence="tests/jit/test_open_shapes.py",
    where=lambda target: target.is_open and target.backend == "eager",
    run=check_open_sizes,
)
