"""A trace has no shapes for a CTC loss whose lengths are tensors (`SHAPELESS_CTC`).

What the loss keeps for its backward pass follows from the longest target. On a CPU a trace records an operation of this
library instead, which keeps it for the longest target that there is room for, so that it is right for the lengths of
every batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcamp._upstream import SHAPELESS_CTC
from funcamp._upstream.renamed import renamed

_aten = torch.ops.aten


def _shape_of_alphas(log_probs: Tensor, targets: Tensor) -> tuple[int, int, int]:
    """Return the shape for the longest target: for targets in rows, or one after the other."""
    steps, batch, _ = log_probs.shape
    return batch, steps, 2 * targets.shape[-1] + 1


def _ctc_loss(log_probs: Tensor, targets: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    loss, alphas = _aten._ctc_loss.Tensor(log_probs, targets, *args)
    unused = _shape_of_alphas(log_probs, targets)[2] - alphas.shape[2]
    return loss, torch.nn.functional.pad(alphas, (0, unused))


def _shapes(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty(log_probs.shape[1]), log_probs.new_empty(_shape_of_alphas(log_probs, targets))


def _shape_of_gradient(_: Tensor, log_probs: Tensor, *__: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


#: What a trace records instead of these operations.
_instead: dict[Any, Any] = {}
if SHAPELESS_CTC.present:
    _instead = {
        _aten._ctc_loss.Tensor: renamed("ctc_loss", _aten._ctc_loss.Tensor, _ctc_loss, shapes=_shapes, key="CPU"),
        _aten._ctc_loss_backward.Tensor: renamed(
            "ctc_loss_backward",
            _aten._ctc_loss_backward.Tensor,
            _aten._ctc_loss_backward.Tensor,
            shapes=_shape_of_gradient,
            key="CPU",
        ),
    }


def of_known_shape(operation: Any, args: Any) -> Any:
    """Return the operation that a trace records instead of one whose shape follows from values; mostly itself."""
    instead = _instead.get(operation)
    return operation if instead is None or args[0].device.type != "cpu" else instead
