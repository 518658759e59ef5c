"""Gradient accumulation: the mean over micro-batches with one scale, weighted if they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcamp import _tree, _upstream
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
    records: Tree
    """The records of the tape."""
    aux: Tree
    """The auxiliary outputs; of a batch stacked over its micro-batches."""


#: (the buffers before, a micro-batch, its share or None) -> its `Result`.
Differentiate = Callable[[dict[str, Tensor], Tree, "Tensor | None"], Result]


class _Carry(NamedTuple):
    """What one micro-batch passes on to the next."""

    sums: list[Tensor | None]
    """The sums of the gradients; None for those that the loss does not have."""
    buffers: dict[str, Tensor]
    records: Tree


def micro_batches(batch: Tree, limit: int) -> list[Tree]:
    """Return the micro-batches along the first dimension of a batch.

    Raises:
        ValueError: tensors of batch have no micro-batch, more than limit, or different numbers of them.
    """
    tensors = [leaf for leaf in _tree.leaves(batch) if isinstance(leaf, Tensor)]
    # Under symbolic tracing sizes cannot be hashed; int() turns them into constants.
    counts = {int(leaf.shape[0]) if leaf.dim() else 0 for leaf in tensors}
    if len(counts) != 1 or not 1 <= min(counts) <= limit:
        raise ValueError(
            f"step: every tensor of batch must hold 1 to {limit} micro-batches along its first dimension, all the same "
            f"number; got {[tuple(leaf.shape) for leaf in tensors]}: stack them, "
            "[torch.stack(parts) for parts in zip(*micro_batches)]"
        )
    return _tree.unstacked(batch, min(counts))


def accumulate(
    differentiate: Differentiate,
    params: Tree,
    buffers: dict[str, Tensor],
    tape: Tree,
    batch: Tree,
    micro_batches: list[Tree],
    shares: Shares,
    *,
    scan: bool,
) -> Result:
    """Sum gradients and records over the micro-batches of a batch, and return the mean of their losses.

    A non-finite gradient of one micro-batch makes the sum non-finite, so one check afterwards covers all. Buffers pass
    from one micro-batch to the next; aux is stacked.

    Args:
        differentiate: returns the `Result` of one micro-batch.
        params: a tree like the gradients.
        buffers: the buffers before the step.
        tape: the tape of the loss's taps.
        batch: the micro-batches along the first dimension, for scan.
        micro_batches: the same as a list.
        shares: how much each one counts.
        scan: run one micro-batch in a loop of the compiled program instead of all of them one after the other.
    """
    leaves, spec = _tree.flatten(params)
    tape_leaves, tape_spec = _tree.flatten(tape)

    def add(carry: _Carry, micro_batch: Tree, share: Tensor | None) -> tuple[_Carry, Tensor, Tree]:
        """Return what passes on after a micro-batch, its loss and its auxiliary outputs."""
        result = differentiate(carry.buffers, micro_batch, share)
        gradients = _tree.leaves(result.gradients)
        buffers = result.buffers
        records = _tree.unflatten(_added(_tree.leaves(carry.records), _tree.leaves(result.records)), tape_spec)
        if share is not None:
            # A micro-batch with a share of 0 changes nothing: the backward pass of a mean over 0 examples gives NaN.
            is_left_out = share == 0
            gradients = _zeroed_if(is_left_out, gradients)
            buffers = _where(is_left_out, carry.buffers, buffers)
            records = _where(is_left_out, carry.records, records)
        sums = _added(carry.sums, gradients)
        return _Carry(sums, buffers, records), result.loss, result.aux

    zeros: list[Tensor | None] = [None if leaf is None else torch.zeros_like(leaf) for leaf in leaves]
    no_records = _tree.map_leaves(torch.zeros_like, tape_leaves, tape_spec)
    carry = _Carry(zeros, buffers, no_records)
    if scan and compiling():
        carry, losses, aux = _scanned(add, carry, batch, shares.each)
    else:
        carry, losses, aux = _one_after_the_other(add, carry, micro_batches, shares.each)
    gradients = _tree.unflatten(carry.sums, spec)
    return Result(gradients, shares.mean(losses), carry.buffers, carry.records, aux)


#: (what passes on, a micro-batch, its share or None) -> what passes on after it, its loss, its auxiliary outputs.
_Add = Callable[[_Carry, Tree, "Tensor | None"], tuple[_Carry, Tensor, Tree]]


def _added(sums: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the sums with gradients, or records, added in the dtype of the sums; None adds nothing."""
    new_sums: list[Tensor | None] = []
    for total, gradient in zip(sums, gradients):
        if total is None or gradient is None:
            new_sums.append(total)
        else:
            new_sums.append(total + gradient.to(total.dtype))
    return new_sums


def _zeroed_if(condition: Tensor, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return zeros instead of the gradients if a condition of shape () holds."""
    chosen: list[Tensor | None] = []
    for gradient in gradients:
        chosen.append(None if gradient is None else torch.where(condition, 0.0, gradient))
    return chosen


def _where(condition: Tensor, if_true: Tree, if_false: Tree) -> Tree:
    """Return the first tree if a condition of shape () holds, else the second."""
    leaves, spec = _tree.flatten(if_true)
    chosen = [torch.where(condition, one, other) for one, other in zip(leaves, _tree.leaves(if_false))]
    return _tree.unflatten(chosen, spec)


def _one_after_the_other(
    add: _Add, carry: _Carry, micro_batches: Sequence[Tree], shares: Tensor | None
) -> tuple[_Carry, Tensor, Tree]:
    """Add every micro-batch; return what passes on in the end, and all losses and auxiliary outputs, stacked."""
    each_loss: list[Tensor] = []
    each_aux: list[Tree] = []
    each_share = [None] * len(micro_batches) if shares is None else shares
    for micro_batch, share in zip(micro_batches, each_share):
        carry, loss, aux = add(carry, micro_batch, share)
        each_loss.append(loss)
        each_aux.append(aux)
    return carry, torch.stack(each_loss), _tree.stacked(each_aux)


class _TorchScan(NamedTuple):
    """torch's scan, which has no public name."""

    function: Any
    """What Dynamo traces."""
    operator: Any
    """What is called with a subgraph that was traced already."""


_torch_scan: _TorchScan | None = None


def can_scan() -> bool:
    """Return whether torch has its scan (it has no public name); call this before tracing anything."""
    global _torch_scan
    function = _upstream.find("torch._higher_order_ops.scan.scan")
    operator = _upstream.find("torch._higher_order_ops.scan.scan_op")
    if _upstream.usable(function, operator):
        _torch_scan = _TorchScan(function, operator)
    return _torch_scan is not None


def _scanned(add: _Add, carry: _Carry, batch: Tree, shares: Tensor | None) -> tuple[_Carry, Tensor, Tree]:
    """Do as `_one_after_the_other`, by torch's scan along the first dimension of the batch.

    scan takes and returns tensors only: Nones among the sums, and leaves of the batch that are not tensors, stay
    outside.
    """
    leaves, spec = _tree.flatten((batch, shares))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    has_sum = [leaf is not None for leaf in carry.sums]

    def micro_batch_and_share_of(slices: list[Tensor]) -> Tree:
        """Return the micro-batch and its share, from one slice of every tensor."""
        remaining = iter(slices)
        leaves_of_piece = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return _tree.unflatten(leaves_of_piece, spec)

    def to_tensors(carry: _Carry) -> Tree:
        """Return what passes on, without the Nones among the sums."""
        sums = [leaf for leaf in carry.sums if leaf is not None]
        return sums, carry.buffers, carry.records

    def from_tensors(passed_on: Tree) -> _Carry:
        """Invert `to_tensors`."""
        sums, buffers, records = passed_on
        remaining = iter(sums)
        sums_with_nones = [next(remaining) if is_there else None for is_there in has_sum]
        return _Carry(sums_with_nones, buffers, records)

    def combine(before: Tree, slices: list[Tensor]) -> Tree:
        """Add one micro-batch: the function that scan repeats."""
        micro_batch, share = micro_batch_and_share_of(slices)
        after, loss, aux = add(from_tensors(before), micro_batch, share)
        sums_after, buffers_after, records_after = to_tensors(after)
        # scan does not accept an output that is one of its inputs. The sums are new tensors.
        return (sums_after, clone(buffers_after), clone(records_after)), clone((loss, aux))

    passed_on, (losses, aux) = _scan(combine, to_tensors(carry), tensors)
    return from_tensors(passed_on), losses, aux


def _scan(combine: Callable[[Tree, list[Tensor]], tuple[Tree, Tree]], start: Tree, tensors: list[Tensor]) -> Tree:
    """Call torch's scan in a program that Dynamo or `jit` traces."""
    assert _torch_scan is not None
    if torch.compiler.is_dynamo_compiling():
        return _torch_scan.function(combine, start, tensors)
    carry, carry_spec = _tree.flatten(start)
    output_specs: list[_tree.TreeSpec] = []

    def flat_combine(*values: Tensor) -> list[Tensor]:
        before = _tree.unflatten(list(values[: len(carry)]), carry_spec)
        after, outputs = combine(before, list(values[len(carry) :]))
        output_leaves, output_spec = _tree.flatten(outputs)
        output_specs.append(output_spec)
        return [*_tree.leaves(after), *output_leaves]

    from funcamp._trace.trace import subgraph  # imports torch's tracer, which takes a second

    module, captured = subgraph(flat_combine, [*carry, *(leaf[0] for leaf in tensors)])
    with torch.no_grad():
        results = list(_torch_scan.operator(module, carry, tensors, tuple(captured)))
    carry_after = _tree.unflatten(results[: len(carry)], carry_spec)
    stacked_outputs = _tree.unflatten(results[len(carry) :], output_specs[0])
    return carry_after, stacked_outputs
