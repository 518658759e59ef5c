"""Calls that clip, clear or read gradients, register hooks for them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from funcamp.report import events
from funcamp.report.calls.observed import Function, Observed
from funcamp.report.calls.run import Calls
from funcamp.report.hooks import Hook, gradient_returned, gradient_stored, watched
from funcamp.report.lines import calling_line
from funcamp.report.tensors import tensors_in


class GradientCalls(Calls):
    """Handles the calls of tensors, of modules and of torch's clipping that concern gradients."""

    def handlers(self) -> Iterator[Observed]:
        """Yield the functions that are observed, with the handlers of their calls."""
        yield Observed(Tensor, "register_hook", self._register_hook)
        yield Observed(Tensor, "register_post_accumulate_grad_hook", self._register_hook_after)
        yield Observed(nn.Module, "zero_grad", self._clear)
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            yield Observed(owner, "clip_grad_norm_", self._clip)
            yield Observed(owner, "clip_grad_value_", self._clip)
            if hasattr(owner, "clip_grads_with_norm_"):
                yield Observed(owner, "clip_grads_with_norm_", self._clip)

    def _register_hook(self, function: Function, tensor: Tensor, hook: Hook) -> object:
        return function(tensor, watched(self._run, hook, tensor, gradient_returned))

    def _register_hook_after(self, function: Function, tensor: Tensor, hook: Hook) -> object:
        return function(tensor, watched(self._run, hook, tensor, gradient_stored))

    def _clear(self, function: Function, module: nn.Module, *args: object, **kwargs: object) -> None:
        parameters = self._tracked.parameters(module.parameters())
        self._emit(events.Cleared(calling_line(), parameters, None))
        self._quietly(function, module, *args, **kwargs)

    def _clip(self, function: Function, parameters: object, *args: object, **kwargs: object) -> object:
        clipped = tensors_in(parameters)  # a generator can be read once
        self._run.report_replaced_gradients(clipped)
        keys = self._tracked.parameters(clipped)
        bound = args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value"))
        if kwargs.get("error_if_nonfinite"):
            self._emit(events.HostRead(calling_line(), None))
        if bound != math.inf:
            self._emit(events.Clipped(calling_line(), keys))
            return self._quietly(function, clipped, *args, **kwargs)
        norm = self._quietly(function, clipped, *args, **kwargs)  # to log it
        self._run.gradient_operations.report_norm(norm, keys)
        return norm
