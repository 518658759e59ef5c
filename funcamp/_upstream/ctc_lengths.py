"""A trace has no shapes for a CTC loss whose lengths are tensors (torch 2.11 to 2.15).

What the loss keeps for its backward pass follows from the longest target. On a CPU a trace records an operation of this
library instead, which keeps it for the longest target that there is room for, so that it is right for the lengths of
every batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp._types import Args, Operation
from funcamp._upstream.renamed import renamed

_aten = torch.ops.aten


def _shape_of_alphas(log_probs: Tensor, targets: Tensor) -> tuple[int, int, int]:
    """Return the shape of alphas for the longest target: for targets in rows, or one after the other."""
    step_count, batch_size, _ = log_probs.shape
    longest = targets.shape[-1]
    return batch_size, step_count, 2 * longest + 1  # a blank before, between and after the labels


def _ctc_loss(log_probs: Tensor, targets: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    """Return the losses of a batch, and what the backward pass needs (alphas), padded to the longest target."""
    loss, alphas = _aten._ctc_loss.Tensor(log_probs, targets, *args)
    _, _, padded_length = _shape_of_alphas(log_probs, targets)
    return loss, torch.nn.functional.pad(alphas, (0, padded_length - alphas.shape[2]))


def _new_results(log_probs: Tensor, targets: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Return tensors like the results of `_ctc_loss`."""
    batch_size = log_probs.shape[1]
    return log_probs.new_empty(batch_size), log_probs.new_empty(_shape_of_alphas(log_probs, targets))


def _new_gradient(_: Tensor, log_probs: Tensor, *__: object) -> Tensor:
    """Return a tensor like the gradient with respect to log_probs."""
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


#: What a trace records instead of these operations.
_replacements: dict[Operation, Operation] = {
    _aten._ctc_loss.Tensor: renamed("ctc_loss", _aten._ctc_loss.Tensor, _ctc_loss, shapes=_new_results, key="CPU"),
    _aten._ctc_loss_backward.Tensor: renamed(
        "ctc_loss_backward",
        _aten._ctc_loss_backward.Tensor,
        _aten._ctc_loss_backward.Tensor,
        shapes=_new_gradient,
        key="CPU",
    ),
}


def of_known_shape(operation: Operation, args: Args) -> Operation:
    """Return the operation that a trace records instead of one whose shape follows from values; otherwise itself."""
    replacement = _replacements.get(operation)
    if replacement is None or args[0].device.type != "cpu":
        return operation
    return replacement
