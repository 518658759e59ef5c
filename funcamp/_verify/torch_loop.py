"""The ordinary torch loop that a `TrainStep` replaces, written out: `verify` compares the step with it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._autograd.module_loss import ModuleLoss
from funcamp._optim.chain import Chain
from funcamp._step.state import TrainState
from funcamp._step.step import TrainStep
from funcamp._step.torch_state import TorchGroup, groups_of, hyperparameters_of
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
        groups = groups_of("verify", step, state)
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
        values = expand(state.params)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(values[name])
            self._write_buffers(state.buffers)
        self._average: dict[str, Tensor] = {}
        """The average of the parameters by name; empty without `ema_decay`."""
        if self._options.ema_decay is not None:
            self._average = {name: value.clone() for name, value in expand(state.ema).items()}

        self._optimizers: list[tuple[TorchGroup, torch.optim.Optimizer]] = []
        saved = step.to_torch(state)["optimizer"] if self._applied else {}
        for index, group in enumerate(groups_of("verify", step, state)):
            parameters = [named[name] for name in group.names]
            param_group = {**self._hyperparameters(group), "params": parameters}
            optimizer = group.optimizer._cls([param_group], **group.optimizer._arguments)
            if self._applied:
                # One for all groups, or by label if the classes differ.
                groups = saved.get("param_groups")
                part = {**saved, "param_groups": [groups[index]]} if groups else saved[group.label]
                optimizer.load_state_dict(part)
            self._optimizers.append((group, optimizer))

    def _hyperparameters(self, group: TorchGroup) -> dict[str, object]:
        """Return the hyperparameters of a group at this step: schedules evaluated."""
        return hyperparameters_of(group.optimizer, torch.tensor(self._applied, device=self._device))

    def step(self, batch: Tree, scale: float) -> Row:
        """Train on one batch with a scale, and return what there is to compare."""
        self._loss_fn.model.zero_grad()
        buffers_before = clone(self._loss_fn.buffers())
        scaler = torch.amp.GradScaler(self._device.type, init_scale=scale)
        loss = self._backward(batch, scaler)
        is_skipped = self._apply(scaler)
        if is_skipped and not self._loss_fn.keep_buffers:  # as the step does by default
            self._write_buffers(buffers_before)

        row = {"metrics.loss": loss, "metrics.found_inf": torch.tensor(float(is_skipped))}
        row |= {f"params.{name}": value for name, value in self.parameters.items()}
        row |= {f"buffers.{name}": value for name, value in self._loss_fn.buffers().items()}
        row |= {f"ema.{name}": value for name, value in self._average.items()}
        for group, optimizer in self._optimizers:
            for name in set(group.names) & set(self.parameters):
                for entry, value in optimizer.state.get(self.parameters[name], {}).items():
                    if isinstance(value, Tensor):
                        row[group.key(entry, name)] = value
        return copied_to_host(row)

    def _write_buffers(self, values: dict[str, Tensor]) -> None:
        for name, buffer in self._loss_fn.buffers().items():
            buffer.copy_(values[name])

    def _backward(self, batch: Tree, scaler: torch.amp.GradScaler) -> Tensor:
        """Add up the scaled gradients of all micro-batches; return the mean of their losses."""
        pieces = [batch]
        if self._options.accumulate > 1:
            pieces = _tree.unstacked(batch, len(_tree.tensors_in(batch)[0]))
        weight = self._options.weight
        weights = [1.0 if weight is None else float(weight(piece)) for piece in pieces]
        total = sum(weights) or math.nan  # as in the step, which skips if all weights are 0
        dtype = self._options.policy.compute_dtype
        mean_loss: Any = 0.0
        for piece, weight_of_piece in zip(pieces, weights):
            with torch.autocast(self._device.type, dtype, enabled=dtype != torch.float32):
                returned: Any = self._loss_fn._evaluate(piece)
            loss = returned[0] if self._loss_fn.has_aux else returned
            # The factors of a step: a float32 tensor with weights, else a division.
            share = loss / len(pieces) if weight is None else loss * torch.tensor(weight_of_piece / total)
            after_forward = clone(self._loss_fn.buffers())
            scaler.scale(share).backward()
            for name, buffer in self._loss_fn.buffers().items():
                if distance(buffer, after_forward[name]):
                    self.written_backward.add(name)
            self._write_buffers(after_forward)
            mean_loss = mean_loss + share.detach()
        return mean_loss.to(loss.dtype)  # type: ignore[no-any-return]

    def _apply(self, scaler: torch.amp.GradScaler) -> bool:
        """Unscale, clip, take the optimizers' steps and move the average; return whether that was skipped."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                self.without_gradient.add(name)
                parameter.grad = torch.zeros_like(parameter)
        for group, optimizer in self._optimizers:
            optimizer.param_groups[0].update(self._hyperparameters(group))
            scaler.unscale_(optimizer)
        trained = list(self.parameters.values())
        is_skipped = not all(torch.isfinite(tensor.grad).all() for tensor in trained if tensor.grad is not None)
        if self._options.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, float(self._options.max_norm))
        if self._options.max_value is not None:
            torch.nn.utils.clip_grad_value_(trained, float(self._options.max_value))
        if not is_skipped:
            self._applied += 1
            for _, optimizer in self._optimizers:
                scaler.step(optimizer)
            for name, average in self._average.items():
                average.lerp_(self.parameters[name].detach(), 1 - (self._options.ema_decay or 0.0))
        return is_skipped
