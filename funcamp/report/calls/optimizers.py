"""The calls of optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from funcamp.report import events
from funcamp.report.calls.observed import Function, Observed
from funcamp.report.calls.run import Calls, Run
from funcamp.report.events import Key
from funcamp.report.lines import calling_line

if TYPE_CHECKING:
    from torch.amp import GradScaler


class OptimizerCalls(Calls):
    """Handles the calls of optimizers, and reports what scalers do with optimizers."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.applied: set[Key] = set()
        """The optimizers that have taken their own step since the scaler's step was called."""

    def handlers(self) -> Iterator[Observed]:
        """Yield the functions that are observed, with the handlers of their calls."""
        yield Observed(Optimizer, "__init__", self._make)
        yield Observed(Optimizer, "zero_grad", self._clear)
        yield Observed(Optimizer, "load_state_dict", self._load)

    @contextlib.contextmanager
    def observing_steps(self) -> Iterator[None]:
        """Context manager: the own steps of all optimizers are observed, by torch's hooks."""
        with contextlib.ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._begin_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._end_step).remove)
            yield

    def _make(self, function: Function, optimizer: Optimizer, *args: object, **kwargs: object) -> None:
        self._quietly(function, optimizer, *args, **kwargs)
        parameters = self._tracked.parameters_of(optimizer)
        name = type(optimizer).__name__
        self._emit(events.OptimizerMade(calling_line(), self._tracked.key(optimizer), parameters, name))

    def _begin_step(self, optimizer: Optimizer, *_: object) -> None:
        """Before an optimizer's own step, and before its hooks, which may unscale: what they do is not seen."""
        if not self._run.in_scaler_step:
            if getattr(optimizer, "_optimizer_step_pre_hooks", None):
                parameters = self._tracked.parameters_of(optimizer)
                self._emit(events.GradientWritten(calling_line(), parameters, is_still_scaled=False))
            self.report_use(events.StepCalled, optimizer, None)
        self._run.stepping.add(self._tracked.key(optimizer))

    def _end_step(self, optimizer: Optimizer, *_: object) -> None:
        """After an optimizer's own step."""
        key = self._tracked.key(optimizer)
        self._run.stepping.discard(key)
        self.applied.add(key)
        if not self._run.in_scaler_step:
            self._emit(events.StepEnded(calling_line(), key, True))

    def report_use(
        self, event_type: type[events.OptimizerEvent], optimizer: Optimizer, scaler: GradScaler | None
    ) -> None:
        """Report a call that uses an optimizer's gradients, and before it the gradients that the loop has replaced."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._run.report_replaced_gradients(parameters)
        event = event_type(
            calling_line(),
            optimizer=self._tracked.key(optimizer),
            scaler=None if scaler is None else self._tracked.key(scaler),
            parameters=self._tracked.parameters_of(optimizer),
            has_enabled_scaler=scaler is not None and scaler.is_enabled(),
        )
        self._emit(event)

    def _clear(self, function: Function, optimizer: Optimizer, *args: object, **kwargs: object) -> None:
        parameters = self._tracked.parameters_of(optimizer)
        self._emit(events.Cleared(calling_line(), parameters, self._tracked.key(optimizer)))
        self._quietly(function, optimizer, *args, **kwargs)

    def _load(self, function: Function, optimizer: Optimizer, *args: object, **kwargs: object) -> None:
        self._emit(events.OptimizerLoaded(calling_line(), self._tracked.key(optimizer)))
        self._quietly(function, optimizer, *args, **kwargs)
