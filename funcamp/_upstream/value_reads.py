"""The places in which torch's own Python reads a value: to choose a faster form, or to check an argument.

A trace has no values. Two functions and the checks of distributions get the answer with which the same numbers follow;
for two methods of layers a trace runs the same formula without the read. `nn.SyncBatchNorm` is one of them, too.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn import functional as F

from funcamp import _upstream

_detect_is_causal_mask: Any = _upstream.find("torch.nn.modules.transformer._detect_is_causal_mask")
#: What to answer the functions that ask whether something holds: is the mask causal, so that attention need not read
#: it; is a variance negative, which is an error; are all values those that a distribution takes.
_ANSWERS = {
    getattr(function, "__code__", None): answer
    for function, answer in {
        _detect_is_causal_mask: False,
        F.gaussian_nll_loss: False,
        Distribution.__init__: True,
        Distribution._validate_sample: True,
    }.items()
}
#: How many frames, those of dispatch modes, there are at most between such a function and the watch of its read.
_FRAMES_BETWEEN = 16
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class _AdaptiveOutput(NamedTuple):
    """What `nn.AdaptiveLogSoftmaxWithLoss` returns."""

    output: Tensor
    loss: Tensor


def answer_to_read() -> bool | None:
    """Return the answer to the read that is being dispatched, if it is one of torch's own; else None."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_FRAMES_BETWEEN):
        if frame is None or frame.f_code in _ANSWERS:
            break
        frame = frame.f_back
    return None if frame is None else _ANSWERS.get(frame.f_code)


@contextlib.contextmanager
def layers_without_reads(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context manager: those of the modules whose class reads a value run the same formula without the read."""
    replaced: list[nn.Module] = []
    try:
        for module in modules:
            forward: Callable[..., Any]
            if isinstance(module, _BATCH_NORMS) and module.momentum is None:
                forward = functools.partial(_forward_of_batch_norm, module)
            elif getattr(type(module), "forward", None) is nn.AdaptiveLogSoftmaxWithLoss.forward:
                forward = functools.partial(_forward_of_adaptive_softmax, module)
            else:
                continue
            if "forward" not in vars(module):
                vars(module)["forward"] = forward
                replaced.append(module)
        yield
    finally:
        for module in replaced:
            vars(module).pop("forward", None)


def _forward_of_batch_norm(module: Any, x: Tensor) -> Tensor:
    """Normalize, and average the statistics of all batches; torch divides by the number of batches on the host."""
    forward: Callable[..., Tensor] = type(module).forward
    if not (module.training and module.track_running_stats) or module.num_batches_tracked is None:
        return forward(module, x)
    mean, variance = module.running_mean, module.running_var
    # With a momentum of 1 they become those of this batch. They are others, because a backward pass reads them.
    module.running_mean, module.running_var, module.momentum = mean.clone(), variance.clone(), 1.0
    try:
        result = forward(module, x)
        batch_mean, batch_variance = module.running_mean, module.running_var
    finally:
        module.running_mean, module.running_var, module.momentum = mean, variance, None
    with torch.no_grad():
        share = 1.0 / module.num_batches_tracked.to(mean.dtype)
        mean.copy_(share * batch_mean + (1.0 - share) * mean)
        variance.copy_(share * batch_variance + (1.0 - share) * variance)
    return result


def _forward_of_adaptive_softmax(module: Any, x: Tensor, target: Tensor) -> _AdaptiveOutput:
    """Return log probabilities of the targets and their loss; torch selects each cluster's rows by their number.

    Here each cluster computes all rows, of which those of other clusters are not used.
    """
    is_batched = target.dim() > 0
    if not is_batched:
        x, target = x.unsqueeze(0), target.unsqueeze(0)
    head = F.log_softmax(module.head(x), dim=1)
    column = target
    in_tail = torch.zeros_like(x[:, 0])
    for number, (low, high) in enumerate(zip(module.cutoffs[:-1], module.cutoffs[1:])):
        is_here = (target >= low) & (target < high)
        row_target = torch.where(is_here, target - low, 0)
        cluster = F.log_softmax(module.tail[number](x), dim=1)
        in_tail = torch.where(is_here, cluster.gather(1, row_target.unsqueeze(1)).squeeze(1), in_tail)
        column = torch.where(is_here, module.shortlist_size + number, column)
    output = in_tail + head.gather(1, column.unsqueeze(1)).squeeze(1)
    loss = (-output).mean()
    return _AdaptiveOutput(output if is_batched else output.squeeze(0), loss)
