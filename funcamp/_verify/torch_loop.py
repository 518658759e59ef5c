"""The ordinary torch loop that a `TrainStep` replaces, written out: `verify` compares the step with it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from funcamp._autograd.module_loss import ModuleLoss
from funcamp._optim.chain import Chain
from funcamp._step.accumulate import micro_batches
from funcamp._step.state import TrainState
from funcamp._step.step import TrainStep
from funcamp._step.torch_state import TorchGroup, groups_of, hyperparameters_of, optimizer_state_dict
from funcamp._storage.params import clone, expand
from funcamp._types import Tree
from funcamp._verify.rounding import Row, copied_to_host, distance


def why_not(step: TrainStep, state: TrainState) -> str:
    """Return why there is no torch loop that computes what this step does; "" if there is one."""
    loss_fn = step.loss_fn
    parallel = step._options.parallel
    if not isinstance(loss_fn, ModuleLoss) or loss_fn.model is not loss_fn.made_of:
        return "the loss is not of module_loss"
    if parallel.size > 1 or parallel.shard or parallel.reduce is not None:
        return "the step communicates with other processes"
    if isinstance(step.optimizer, Chain):
        return "the optimizer is a chain"
    try:
        groups = groups_of("verify", step, state, None)
    except TypeError:
        return "the optimizer is not made by stateless"
    if int(state.step) and not all(group.is_of_torch for group in groups):
        return "the state, of a class that is not torch.optim's, is not the first one"
    return ""


class TorchLoop:
    """`torch.autocast`, `torch.amp.GradScaler` and the optimizers' own classes around a module.

    Every step gets its scale: the rule that moves it does not depend on the model. Changes the module, which
    `CopiedContents` puts back.

    Args:
        step: the step; see `why_not`.
        state: the state that it starts from.
    """

    def __init__(self, step: TrainStep, state: TrainState) -> None:
        assert isinstance(step.loss_fn, ModuleLoss)
        self._loss_fn = step.loss_fn
        self._options = step._options
        self._device = state.scaler.scale.device
        self._applied = int(state.step) - int(state.skipped)
        self.without_gradient: set[str] = set()
        """The parameters that got no gradient. A step gives them zeros, so that weight decay moves them."""
        self.written_backward: set[str] = set()
        """The buffers that a backward pass wrote. They keep what the forward pass wrote, as in a step."""

        # The state's values in the module. Of two names of one parameter the one under which it is stored.
        named = dict(self._loss_fn.model.named_parameters())
        self.parameters = {name: named[name] for name in dict.fromkeys(self._loss_fn.names.values())}
        with torch.no_grad():
            self._write(self.parameters, expand(state.params))
            self._write(self._loss_fn.buffers(), state.buffers)
        decay = self._options.ema_decay
        self._average: dict[str, Tensor] = {} if decay is None else clone(expand(state.ema))
        """The average of the parameters by name; empty without `ema_decay`."""

        self._optimizers: list[tuple[TorchGroup, torch.optim.Optimizer]] = []
        for group in groups_of("verify", step, state, None):
            param_group = {**self._hyperparameters(group), "params": [named[name] for name in group.names]}
            optimizer = group.optimizer._cls([param_group], **group.optimizer._arguments)
            if self._applied:
                optimizer.load_state_dict(optimizer_state_dict([group], step.state_dict(state)))
            self._optimizers.append((group, optimizer))

    def _hyperparameters(self, group: TorchGroup) -> dict[str, object]:
        """Return the hyperparameters of a group at this step: schedules evaluated."""
        return hyperparameters_of(group.optimizer, torch.tensor(self._applied, device=self._device))

    @staticmethod
    def _write(tensors: dict[str, Any], values: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            tensor.copy_(values[name])

    def step(self, batch: Tree, scale: float) -> Row:
        """Train on one batch with a scale, and return what there is to compare."""
        self._loss_fn.model.zero_grad()
        buffers = self._loss_fn.buffers()
        buffers_before = clone(buffers)
        scaler = torch.amp.GradScaler(self._device.type, init_scale=scale)
        loss = self._backward(batch, scaler)
        is_skipped = self._apply(scaler)
        if is_skipped and not self._loss_fn.keep_buffers:  # as the step does by default
            self._write(buffers, buffers_before)

        row = {"metrics.loss": loss, "metrics.found_inf": torch.tensor(float(is_skipped))}
        for kind, values in ("params", self.parameters), ("buffers", buffers), ("ema", self._average):
            row |= {f"{kind}.{name}": value for name, value in values.items()}
        for group, optimizer in self._optimizers:
            for name, parameter in self.parameters.items():
                for entry, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        row[group.key(entry, name)] = value
        return copied_to_host(row)

    def _backward(self, batch: Tree, scaler: torch.amp.GradScaler) -> Tensor:
        """Add up the scaled gradients of all micro-batches; return the mean of their losses."""
        limit, weight, dtype = self._options.accumulate, self._options.weight, self._options.policy.compute_dtype
        pieces = micro_batches(batch, limit) if limit > 1 else [batch]
        weights = [1.0 if weight is None else float(weight(piece)) for piece in pieces]
        total = sum(weights) or math.nan  # as in the step, which skips if all weights are 0
        buffers = self._loss_fn.buffers()
        mean_loss: Any = 0.0
        for piece, weight_of_piece in zip(pieces, weights):
            with torch.autocast(self._device.type, dtype, enabled=dtype != torch.float32):
                returned: Any = self._loss_fn._evaluate(piece)
            loss = returned[0] if self._loss_fn.has_aux else returned
            share = loss * (weight_of_piece / total)
            after_forward = clone(buffers)
            scaler.scale(share).backward()
            self.written_backward |= {name for name, buffer in buffers.items() if distance(buffer, after_forward[name])}
            self._write(buffers, after_forward)
            mean_loss = mean_loss + share.detach()
        return mean_loss.to(loss.dtype)  # type: ignore[no-any-return]

    def _apply(self, scaler: torch.amp.GradScaler) -> bool:
        """Unscale, clip, take the optimizers' steps and move the average; return whether that was skipped."""
        gradients: list[Tensor] = []
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                self.without_gradient.add(name)
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        for group, optimizer in self._optimizers:
            optimizer.param_groups[0].update(self._hyperparameters(group))
            scaler.unscale_(optimizer)
        is_skipped = not all(bool(gradient.isfinite().all()) for gradient in gradients)
        if self._options.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), float(self._options.max_norm))
        if self._options.max_value is not None:
            torch.nn.utils.clip_grad_value_(self.parameters.values(), float(self._options.max_value))
        if is_skipped:
            return True
        self._applied += 1
        for _, optimizer in self._optimizers:
            scaler.step(optimizer)
        for name, average in self._average.items():
            average.lerp_(self.parameters[name].detach(), 1 - (self._options.ema_decay or 0.0))
        return False
