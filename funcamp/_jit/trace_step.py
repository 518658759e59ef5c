"""Trace a step: it becomes a function of tensors, which writes the next state or returns it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._jit.jit_options import JitOptions
from funcamp._jit.metadata import check_like
from funcamp._jit.state_memory import StateMemory
from funcamp._jit.strides import copy_with_strides
from funcamp._trace.open_shapes import is_open
from funcamp._trace.trace import Graph, trace
from funcamp._trace.tracing import HostError
from funcamp._types import Step, Tree


def trace_step(
    step: Step,
    options: JitOptions,
    memory: StateMemory,
    batch: Tree,
    tensors: list[Tensor],
    roots: Mapping[str, object],
) -> Graph:
    """Run a step without values, and return its operations.

    Args:
        step: the step.
        options: those of `jit`.
        memory: where the state is.
        batch: the batch.
        tensors: its tensors, of one step.
        roots: the objects that the step's Python reaches, by name.

    Raises:
        TypeError: the step returns no pair.
        ValueError: the next state is unlike the state.
        RuntimeError: the step reads a value on the host, or keeps state in Python that a program cannot.
        Exception: any error of the step.
    """
    owned = memory.current
    state_count = len(owned.leaves)
    batch_of = _tensor_replacer(batch)

    def on_tensors(values: list[Tensor]) -> tuple[list[Tensor], Tree]:
        """Return the leaves of the next state, or none if they are written into the state; and the metrics."""
        state_values = values[:state_count]
        state = owned.filled(state_values)
        next_leaves, metrics = _take_step(step, state, batch_of(values[state_count:]), memory.metadata)
        metric_leaves, metric_spec = _tree.flatten(metrics)
        if options.unroll is not None:
            _check_stackable(metric_leaves)
        with torch.no_grad():
            metric_leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in metric_leaves]
            metrics = _tree.unflatten(metric_leaves, metric_spec)
            if options.donate:
                _write_state(state_values, next_leaves)
                return [], metrics
            # A leaf of the old state or of the batch is copied: a later donated step writes the new state's memory.
            return list(map(_copied_like, next_leaves, owned.leaves)), metrics

    try:
        return trace(
            on_tensors,
            [*owned.leaves, *tensors],
            {leaf.device.type for leaf in owned.leaves},
            in_cuda_graph=memory.graphs is not None,
            roots=roots,
            state_count=state_count,
        )
    except HostError as error:
        raise RuntimeError(f"jit: step must {error}") from None


def _tensor_replacer(batch: Tree) -> Callable[[list[Tensor]], Tree]:
    """Return a function from tensors to the batch that has them instead of its own tensors."""
    batch_leaves, batch_spec = _tree.flatten(batch)
    positions = [index for index, leaf in enumerate(batch_leaves) if isinstance(leaf, Tensor)]

    def batch_of(values: list[Tensor]) -> Tree:
        leaves = list(batch_leaves)
        for position, value in zip(positions, values):
            needs_gradient = batch_leaves[position].requires_grad
            leaves[position] = value.detach().requires_grad_() if needs_gradient else value
        return _tree.unflatten(leaves, batch_spec)

    return batch_of


def _copied_like(leaf: Tensor, former: Tensor) -> Tensor:
    """Return a copy of a leaf of the next state in the strides of the former one, for which programs are compiled."""
    copy = leaf.clone()
    return copy if copy.stride() == former.stride() else copy_with_strides(copy, former.stride())


def _write_state(state_values: list[Tensor], next_leaves: list[Tensor]) -> None:
    """Write the leaves of the next state into those of the state."""
    # All values are computed before the first write; a clone of a computed value costs nothing.
    writes: list[tuple[Tensor, Tensor]] = []
    for former, leaf in zip(state_values, next_leaves):
        if leaf is not former:
            writes.append((former, leaf.clone()))
    for former, value in writes:
        former.copy_(value)


def _take_step(step: Step, state: Tree, batch: Tree, state_metadata: Tree) -> tuple[list[Tensor], Tree]:
    """Return the leaves of the next state, and the metrics.

    Raises:
        TypeError: the step returns no pair.
        ValueError: the next state is unlike the state.
    """
    result = step(state, batch)
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"jit: step must return the pair (state, metrics), an evaluation (state, result); got {_tree.brief(result)}"
        )
    next_state, metrics = result
    check_like(("state", "the step's new state"), state_metadata, next_state)
    return [leaf for leaf in _tree.leaves(next_state) if leaf is not None], metrics


def _check_stackable(metric_leaves: Sequence[object]) -> None:
    """Raise HostError if the shape of a metric may differ from step to step."""
    for leaf in metric_leaves:
        if is_open(leaf):
            raise HostError(
                "return metrics of fixed shapes with unroll, which stacks those of several steps; got "
                f"{_tree.describe(leaf)}"
            )
