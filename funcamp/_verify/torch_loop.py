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
from funcamp._step.torch_state import TorchGroup, groups_of, hyperparameters_of
from funcamp._storage.params import clone, expand
from funcamp._types import Tree
from funcamp._verify.rounding import Row


class TorchLoop:
    """`torch.autocast`, `torch.amp.GradScaler` and the optimizers' own classes around a module.

    Every step gets its scale: the rule that moves it does not depend on the model. On purpose, and as in the step, a
    parameter without a gradient gets zeros, and buffers keep what the forward pass wrote. Changes the module, which
    `CopiedContents` puts back.

    Args:
        step: the step.
        state: the state that it starts from.
        unused: gets the names of the parameters without a gradient.

    Raises:
        NotImplementedError: there is no torch loop that computes what this step does.
        TypeError: there is none, because of the optimizer.
    """

    def __init__(self, step: TrainStep, state: TrainState, unused: set[str]) -> None:
        loss_fn, parallel = step.loss_fn, step.options.parallel
        if not isinstance(loss_fn, ModuleLoss):
            raise NotImplementedError("the loss is not of module_loss")
        if parallel.size > 1 or parallel.shard:
            raise NotImplementedError("the step communicates with other processes")
        if isinstance(step.optimizer, Chain):
            raise NotImplementedError("the optimizer is a chain")
        self._loss_fn = loss_fn
        self._options = step.options
        self._device_type = state.step.device.type
        self._unused = unused

        # The state's values in the module. Of two names of one parameter the one under which it is stored.
        all_parameters = loss_fn.module_parameters()
        self._parameters = {name: all_parameters[name] for name in loss_fn.param_shapes}
        values: Any = expand(state.params)
        for name, parameter in self._parameters.items():
            parameter.detach().copy_(values[name])
        self._write_buffers(state.buffers)
        self._average: dict[str, Tensor] = clone(dict(expand(state.ema)))
        """The average of the parameters by name; empty without `ema_decay`."""

        groups = groups_of("verify", step, state)
        exported = step.state_dict(state)
        self._applied = {group.label: exported[f"{group.prefix}applied"] for group in groups}
        """The steps that each group's optimizer has taken; a new one in a state of before has taken none."""
        self._optimizers: list[tuple[TorchGroup, torch.optim.Optimizer]] = []
        saved = step.to_torch(state)["optimizer"] if any(map(int, self._applied.values())) else {}
        for index, group in enumerate(groups):
            if not group.names:  # torch makes no optimizer without parameters
                continue
            given = [all_parameters[name] for name in group.names]  # frozen ones too
            optimizer = group.optimizer.cls(given, **group.optimizer.arguments)
            if "param_groups" in saved:  # one for all groups
                optimizer.load_state_dict({**saved, "param_groups": [saved["param_groups"][index]]})
            elif saved:
                optimizer.load_state_dict(saved[group.label])
            self._optimizers.append((group, optimizer))

    def step(self, batch: Tree, scale: float) -> Row:
        """Train on one batch with a scale, and return what there is to compare."""
        loss_fn = self._loss_fn
        loss_fn.model.zero_grad()
        buffers_before = clone(loss_fn.buffers())
        scaler = torch.amp.GradScaler(self._device_type, init_scale=scale)
        loss = self._backward(batch, scaler)
        found_inf = self._unscale(scaler)
        if not found_inf:
            self._update(scaler)
        elif not loss_fn.keep_buffers:  # as the step does by default
            self._write_buffers(buffers_before)

        row = {"metrics.loss": loss, "metrics.found_inf": torch.tensor(float(found_inf))}
        row |= {f"params.{name}": value for name, value in self._parameters.items()}
        row |= {f"buffers.{name}": value for name, value in loss_fn.buffers().items()}
        row |= {f"ema.{name}": value for name, value in self._average.items()}
        for group, optimizer in self._optimizers:
            for name, parameter in self._parameters.items():
                for entry, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, Tensor):
                        row[group.key(entry, name)] = value
        return row

    def _write_buffers(self, values: dict[str, Tensor]) -> None:
        for name, buffer in self._loss_fn.buffers().items():
            buffer.copy_(values[name])

    def _backward(self, batch: Tree, scaler: torch.amp.GradScaler) -> Tensor:
        """Add up the scaled gradients of all micro-batches; return the mean of their losses."""
        loss_fn, options, dtype = self._loss_fn, self._options, self._options.policy
        pieces = micro_batches(batch, options.accumulate) if options.accumulate > 1 else [batch]
        weights = [1.0 if options.weight is None else float(options.weight(piece)) for piece in pieces]
        total = sum(weights) or math.nan  # as in the step, which skips if all weights are 0
        mean_loss: Any = 0.0
        for piece, weight in zip(pieces, weights):
            with torch.autocast(self._device_type, dtype, enabled=dtype != torch.float32):
                returned: Any = loss_fn.evaluate(piece)
            loss = returned[0] if loss_fn.has_aux else returned
            factor: Any = weight / total
            if options.weight is not None:  # a tensor, with which a loss in 16 bits becomes one in float32
                factor = torch.tensor(factor, dtype=torch.promote_types(loss.dtype, torch.float32))
            share = loss * factor
            after_forward = clone(loss_fn.buffers())
            scaler.scale(share).backward()
            self._write_buffers(after_forward)
            mean_loss = mean_loss + share.detach()
        return mean_loss.to(loss.dtype)  # type: ignore[no-any-return]

    def _unscale(self, scaler: torch.amp.GradScaler) -> bool:
        """Unscale the gradients; return the flag, whether one is not finite."""
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                self._unused.add(name)
                parameter.grad = torch.zeros_like(parameter)
        for group, optimizer in self._optimizers:
            numbers = hyperparameters_of(group.optimizer, self._applied[group.label])
            changing = {name: numbers[name] for name in group.optimizer.dynamic}  # others may be the class's to change
            optimizer.param_groups[0].update(changing)
            scaler.unscale_(optimizer)
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        return not all(bool(gradient.isfinite().all()) for gradient in gradients)

    def _update(self, scaler: torch.amp.GradScaler) -> None:
        """Clip, take the optimizers' steps and move the average."""
        parameters, options = self._parameters, self._options
        if options.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters.values(), float(options.max_norm))
        if options.max_value is not None:
            torch.nn.utils.clip_grad_value_(parameters.values(), float(options.max_value))
        for _, optimizer in self._optimizers:
            scaler.step(optimizer)
        for name, average in self._average.items():
            average.lerp_(parameters[name].detach(), 1 - float(options.ema_decay or 0.0))
        self._applied = {label: count + 1 for label, count in self._applied.items()}
