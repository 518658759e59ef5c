"""Gradient accumulation: the mean over micro-batches with one scale, weighted if they differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcamp import _tree, _upstream
from funcamp._step.shares import Shares
from funcamp._storage.compute_copies import clone
from funcamp._trace.tracing import compiling
from funcamp._types import Tree

#: (what is carried on, one micro-batch, its share or None) -> (scaled gradients of its part of the loss, the loss,
#: what is carried on, aux).
One = Callable[[Tree, Any, "Tensor | None"], tuple[Tree, Tensor, Tree, Any]]


def micro_batches(batch: Any, limit: int) -> list[Any]:
    """Return the micro-batches along the first dimension of a batch.

    Raises:
        ValueError: tensors of batch have no micro-batch, more than limit, or different numbers of them.
    """
    leaves, spec = _tree.flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    # Under symbolic tracing sizes cannot be hashed; int() turns them into constants.
    counts = {int(leaf.shape[0]) if leaf.dim() else 0 for leaf in tensors}
    if len(counts) != 1 or not 1 <= min(counts) <= limit:
        raise ValueError(
            f"step: every tensor of batch must hold 1 to {limit} micro-batches along its first dimension, all the same "
            f"number; got {[tuple(leaf.shape) for leaf in tensors]}: stack them, "
            "[torch.stack(parts) for parts in zip(*micro_batches)]"
        )
    return [
        _tree.unflatten([leaf[index] if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        for index in range(min(counts))
    ]


def accumulate(
    one: One, params: Tree, carried: Tree, batch: Any, pieces: list[Any], shares: Shares, *, scan: bool
) -> tuple[Tree, Tensor, Tree, Any]:
    """Sum gradients over the micro-batches of a batch, and return the mean of their losses.

    A non-finite gradient of one micro-batch makes the sum non-finite, so one check afterwards covers all. What is
    carried (buffers, amaxes) passes from one micro-batch to the next; aux is stacked.
    """
    like = _tree.leaves(params)

    def part(total: list[Any], carried: Tree, piece: Any, share: Tensor | None) -> Any:
        before, (grads, loss, carried, aux) = carried, one(carried, piece, share)
        new = _tree.leaves(grads)
        if share is not None:  # the backward pass of a mean over 0 examples gives NaN
            new = [None if grad is None else torch.where(share == 0, 0.0, grad) for grad in new]
            pairs, spec = zip(_tree.leaves(before), _tree.leaves(carried)), _tree.flatten(before)[1]
            carried = _tree.unflatten([torch.where(share == 0, old, value) for old, value in pairs], spec)
        total = [a if a is None or grad is None else a + grad.to(a.dtype) for a, grad in zip(total, new)]
        return total, carried, loss, aux

    total: list[Any] = [None if leaf is None else torch.zeros_like(leaf) for leaf in like]
    if scan and compiling():
        total, carried, losses, aux = _scanned(part, total, carried, batch, shares.each)
    else:
        kept = []
        for piece, share in zip(pieces, [None] * len(pieces) if shares.each is None else shares.each):
            total, carried, loss, aux = part(total, carried, piece, share)
            kept.append((loss, aux))
        losses = torch.stack([loss for loss, _ in kept])
        aux = _tree.stacked([aux for _, aux in kept])
    return _tree.unflatten(total, _tree.flatten(params)[1]), shares.mean(losses), carried, aux


_scans: tuple[Any, Any] | None = None


def can_scan() -> bool:
    """Return whether torch has its scan (it has no public name); call this before tracing anything."""
    global _scans
    found = _upstream.find("torch._higher_order_ops.scan.scan"), _upstream.find("torch._higher_order_ops.scan.scan_op")
    if _upstream.usable(*found):
        _scans = found
    return _scans is not None


def _scanned(part: Any, total: list[Any], carried: Tree, batch: Any, each: Tensor | None) -> Any:
    present = [a is not None for a in total]
    leaves, spec = _tree.flatten((batch, each))

    def combine(carry: Any, slices: list[Tensor]) -> Any:
        sums, before = carry
        given, taken = iter(sums), iter(slices)
        full = [next(given) if there else None for there in present]
        piece, share = _tree.unflatten([next(taken) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        after, carried, loss, aux = part(full, before, piece, share)
        # scan does not accept an output that is one of its inputs.
        return ([a for a in after if a is not None], clone(carried)), clone((loss, aux))

    start = ([a for a in total if a is not None], carried)
    (sums, carried), (losses, aux) = _scan(combine, start, [leaf for leaf in leaves if isinstance(leaf, Tensor)])
    given = iter(sums)
    return [next(given) if there else None for there in present], carried, losses, aux


def _scan(combine: Callable[[Tree, list[Tensor]], tuple[Tree, Tree]], start: Tree, xs: list[Tensor]) -> Any:
    """Call torch's scan in a program that Dynamo or `jit` traces."""
    assert _scans is not None
    scan, scan_op = _scans
    if torch.compiler.is_dynamo_compiling():
        return scan(combine, start, xs)
    carry, spec = _tree.flatten(start)
    specs = []

    def flat(*values: Tensor) -> list[Tensor]:
        after, out = combine(_tree.unflatten(list(values[: len(carry)]), spec), list(values[len(carry) :]))
        leaves, found = _tree.flatten(out)
        specs.append(found)
        return [*_tree.leaves(after), *leaves]

    from funcamp._trace.trace import subgraph  # imports torch's tracer, which takes a second

    module, captured = subgraph(flat, [*carry, *(leaf[0] for leaf in xs)])
    with torch.no_grad():
        done = list(scan_op(module, carry, xs, tuple(captured)))
    return _tree.unflatten(done[: len(carry)], spec), _tree.unflatten(done[len(carry) :], specs[0])
