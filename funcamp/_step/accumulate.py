"""Gradient accumulation: the mean over micro-batches with one scale, weighted if they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcamp import _tree, _upstream
from funcamp._autograd.tape import Tape, merged, zeros_of
from funcamp._step.shares import Shares
from funcamp._storage.params import clone
from funcamp._trace.tracing import compiling
from funcamp._types import Tree


class Result(NamedTuple):
    """What differentiating the loss of a batch returns, or of one of its micro-batches."""

    gradients: Tree
    """The gradients of the scaled loss, as the parameters are stored."""
    loss: Tensor
    """The unscaled loss."""
    buffers: dict[str, Tensor]
    """The buffers after the forward pass."""
    records: tuple[Tree, ...]
    """The record of every tape."""
    aux: Any
    """The auxiliary outputs; of a batch stacked over its micro-batches."""


#: (the buffers before, a micro-batch, its share or None) -> its `Result`.
Differentiate = Callable[[dict[str, Tensor], Any, "Tensor | None"], Result]


class _Carry(NamedTuple):
    """What passes from one micro-batch to the next."""

    sums: list[Tensor | None]
    buffers: dict[str, Tensor]
    records: tuple[Tree, ...]


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
    differentiate: Differentiate,
    params: Tree,
    buffers: dict[str, Tensor],
    tapes: Sequence[Tape],
    batch: Any,
    micro_batches: list[Any],
    shares: Shares,
    *,
    scan: bool,
) -> Result:
    """Sum gradients over the micro-batches of a batch, merge their records, and return the mean of their losses.

    A non-finite gradient of one micro-batch makes the sum non-finite, so one check afterwards covers all. Buffers pass
    from one micro-batch to the next; aux is stacked.

    Args:
        differentiate: returns the `Result` of one micro-batch.
        params: a tree like the gradients.
        buffers: the buffers before the step.
        tapes: the tapes of the step.
        batch: the micro-batches along the first dimension, for scan.
        micro_batches: the same as a list.
        shares: how much each one counts.
        scan: run one micro-batch in a loop of the compiled program instead of all of them one after the other.
    """
    leaves, spec = _tree.flatten(params)

    def add(carry: _Carry, micro_batch: Any, share: Tensor | None) -> tuple[_Carry, Tensor, Any]:
        result = differentiate(carry.buffers, micro_batch, share)
        gradients = _tree.leaves(result.gradients)
        after = (result.buffers, merged(tapes, carry.records, result.records))
        if share is not None:  # the backward pass of a mean over 0 examples gives NaN
            gradients = [None if leaf is None else torch.where(share == 0, 0.0, leaf) for leaf in gradients]
            after = _kept_if(share == 0, (carry.buffers, carry.records), after)
        sums = [a if a is None or leaf is None else a + leaf.to(a.dtype) for a, leaf in zip(carry.sums, gradients)]
        return _Carry(sums, *after), result.loss, result.aux

    zeros: list[Tensor | None] = [None if leaf is None else torch.zeros_like(leaf) for leaf in leaves]
    carry = _Carry(zeros, buffers, _tree.map_leaves(torch.zeros_like, *_tree.flatten(zeros_of(tapes))))
    if scan and compiling():
        carry, losses, aux = _scanned(add, carry, batch, shares.each)
    else:
        each_loss, each_aux = [], []
        each_share = [None] * len(micro_batches) if shares.each is None else shares.each
        for micro_batch, share in zip(micro_batches, each_share):
            carry, loss, aux = add(carry, micro_batch, share)
            each_loss.append(loss)
            each_aux.append(aux)
        losses, aux = torch.stack(each_loss), _tree.stacked(each_aux)
    return Result(_tree.unflatten(carry.sums, spec), shares.mean(losses), carry.buffers, carry.records, aux)


def _kept_if(kept: Tensor, before: Tree, after: Tree) -> Tree:
    """Return the tree before where kept, else the one after."""
    leaves, spec = _tree.flatten(before)
    return _tree.unflatten([torch.where(kept, old, new) for old, new in zip(leaves, _tree.leaves(after))], spec)


_scans: tuple[Any, Any] | None = None


def can_scan() -> bool:
    """Return whether torch has its scan (it has no public name); call this before tracing anything."""
    global _scans
    found = _upstream.find("torch._higher_order_ops.scan.scan"), _upstream.find("torch._higher_order_ops.scan.scan_op")
    if _upstream.usable(*found):
        _scans = found
    return _scans is not None


def _scanned(add: Callable[..., Any], carry: _Carry, batch: Any, shares: Tensor | None) -> tuple[_Carry, Tensor, Any]:
    present = [leaf is not None for leaf in carry.sums]
    leaves, spec = _tree.flatten((batch, shares))

    def with_nones(sums: Iterable[Tensor]) -> list[Tensor | None]:
        given = iter(sums)
        return [next(given) if there else None for there in present]

    def combine(before: Any, slices: list[Tensor]) -> Any:
        taken = iter(slices)
        micro_batch, share = _tree.unflatten(
            [next(taken) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        )
        after, loss, aux = add(_Carry(with_nones(before[0]), *before[1:]), micro_batch, share)
        sums = [leaf for leaf in after.sums if leaf is not None]
        # scan does not accept an output that is one of its inputs.
        return (sums, *clone((after.buffers, after.records))), clone((loss, aux))

    start = ([leaf for leaf in carry.sums if leaf is not None], carry.buffers, carry.records)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    (sums, buffers, records), (losses, aux) = _scan(combine, start, tensors)
    return _Carry(with_nones(sums), buffers, records), losses, aux


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
