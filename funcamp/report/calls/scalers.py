"""The calls of a scaler: it is made, it scales losses, unscales and steps, and is updated, read, saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from funcamp.report import events
from funcamp.report.autograd_graph import Scaling, is_scaled, mark_scaled
from funcamp.report.calls.observed import Function, Handler, Observed
from funcamp.report.calls.optimizers import OptimizerCalls
from funcamp.report.calls.run import Calls, Run
from funcamp.report.events import Key
from funcamp.report.lines import call_sites, calling_line, is_factor
from funcamp.report.tensors import all_finite, tensors_in
from funcamp.report.torch_names import replaced, with_subclasses, without_modes

if TYPE_CHECKING:
    from torch.amp import GradScaler


class ScalerCalls(Calls):
    """Handles the calls of scalers.

    Args:
        run: what is known about the run.
        optimizers: reports what a scaler does with an optimizer.
    """

    def __init__(self, run: Run, optimizers: OptimizerCalls) -> None:
        super().__init__(run)
        self._optimizers = optimizers
        self._updates: dict[Key, int] = {}
        """How many updates each scaler has had."""
        self._handlers: dict[str, Handler] = {
            "__init__": self._make,
            "scale": self._scale,
            "unscale_": self._unscale,
            "step": self._step,
            "update": self._update,
            "get_scale": self._get_scale,
            "state_dict": self._take_state,
            "__getstate__": self._save,
        }
        """By the name of the method."""

    def handlers(self) -> Iterator[Observed]:
        """Yield the functions that are observed, with the handlers of their calls."""
        for scaler_class in with_subclasses(torch.amp.GradScaler):
            yield from self.handlers_of(scaler_class)

    def handlers_of(self, scaler_class: type) -> Iterator[Observed]:
        """Yield the methods that one class of scalers defines: a subclass may override some."""
        for name in self._handlers.keys() & vars(scaler_class).keys():
            yield Observed(scaler_class, name, self._handlers[name])

    def _make(self, function: Function, scaler: GradScaler, *args: object, **kwargs: object) -> None:
        self._quietly(function, scaler, *args, **kwargs)
        key = self._tracked.key(scaler)
        self._emit(events.ScalerMade(calling_line(), key, call_sites()))

    def _scale(self, function: Function, scaler: GradScaler, outputs: object) -> object:
        self._run.loss_is_finite = all_finite(outputs)
        if isinstance(outputs, Tensor) and scaler.is_enabled():
            grows = self._tracked.derived(outputs) is not None
            self._emit(events.LossScaled(calling_line(), is_scaled(outputs), grows))
        result = self._quietly(function, scaler, outputs)
        if isinstance(result, Iterator):
            losses = list(result)
            self._remember_losses(scaler, losses)
            return iter(losses)
        self._remember_losses(scaler, result)
        return result

    def _remember_losses(self, scaler: GradScaler, losses: object) -> None:
        """Remember scaled losses, and write into their graphs how they were scaled."""
        if not scaler.is_enabled():
            return
        key = self._tracked.key(scaler)
        self._tracked.scales.add(_scale_of(scaler))
        scaling = Scaling(key, self._updates.get(key, 0))
        self._run.has_scaled = True
        for loss in tensors_in(losses):
            self._tracked.remember_loss(loss, scaling)
            if loss.grad_fn is not None:
                mark_scaled(loss.grad_fn, scaling)
            elif not loss.requires_grad:
                self._run.factor_scaling = scaling

    def _unscale(self, function: Function, scaler: GradScaler, optimizer: Optimizer) -> None:
        self._optimizers.report_use(events.Unscaled, optimizer, scaler)
        self._quietly(function, scaler, optimizer)

    def _step(
        self, function: Function, scaler: GradScaler, optimizer: Optimizer, *args: object, **kwargs: object
    ) -> object:
        self._optimizers.report_use(events.StepCalled, optimizer, scaler)
        self._optimizers.applied.clear()
        with replaced(self._run, in_scaler_step=True):
            result = self._quietly(function, scaler, optimizer, *args, **kwargs)
        # An optimizer that wraps another may have no hooks of its own; then its step is taken as applied.
        has_hooks = hasattr(getattr(type(optimizer), "step", None), "hooked")
        is_applied = (bool(self._optimizers.applied) or not has_hooks) and not _skips_itself(scaler, optimizer)
        self._emit(events.StepEnded(calling_line(), self._tracked.key(optimizer), is_applied, _scale_of(scaler)))
        return result

    def _update(self, function: Function, scaler: GradScaler, *args: object, **kwargs: object) -> None:
        key = self._tracked.key(scaler)
        self._emit(events.Updated(calling_line(), key, scaler.is_enabled()))
        self._quietly(function, scaler, *args, **kwargs)
        self._updates[key] = self._updates.get(key, 0) + scaler.is_enabled()

    def _get_scale(self, function: Callable[..., float], scaler: GradScaler) -> float:
        if not scaler.is_enabled():  # the scale is a Python number, which needs no host synchronization
            return self._quietly(function, scaler)
        key = self._tracked.key(scaler)
        self._emit(events.ScaleRead(calling_line(), key, is_factor("get_scale", calling_line())))
        scale = self._quietly(function, scaler)
        self._tracked.scales.add(scale)
        self._run.read_scales[key] = scale
        return scale

    def _take_state(self, function: Function, scaler: GradScaler) -> object:
        line = calling_line()
        if scaler.is_enabled() and is_factor("state_dict", line):  # of `state_dict()["scale"]`
            self._emit(events.ScaleRead(line, self._tracked.key(scaler), is_factor=True))
        return self._save(function, scaler)

    def _save(self, function: Function, scaler: GradScaler) -> object:
        self._emit(events.ScalerSaved(calling_line(), self._tracked.key(scaler)))
        return self._quietly(function, scaler)


def _scale_of(scaler: GradScaler) -> float:
    """Return the scale of a scaler, without a call of `get_scale`; 1 if it has none."""
    scale = getattr(scaler, "_scale", None)  # a disabled one has none
    if not isinstance(scale, Tensor):
        return 1.0
    with without_modes():
        return float(scale.item())


def _skips_itself(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Return whether an optimizer has skipped its step itself, as fused ones do, which get the scaler's flag."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or not scaler.is_enabled():
        return False
    flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
    with without_modes():
        return any(flag.item() for flag in flags)
