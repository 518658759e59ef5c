"""Turn the calls of a run into events: functions of torch are replaced for the time of the run.

To observe another function, add it to `handlers` of the class in `calls/` that has its subject, with a method that
handles its calls. A handler gets the function and the arguments of the call. It emits events, and returns what the
function returns.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

from funcamp.report.calls.backward import BackwardCalls
from funcamp.report.calls.files import FileCalls
from funcamp.report.calls.gradients import GradientCalls
from funcamp.report.calls.observed import Function, Observed
from funcamp.report.calls.optimizers import OptimizerCalls
from funcamp.report.calls.run import Run
from funcamp.report.calls.scalers import ScalerCalls
from funcamp.report.events import Event
from funcamp.report.torch_names import forget_replaced_functions, replaced


class Observer:
    """Watches a run.

    Args:
        emit: gets each event.
    """

    def __init__(self, emit: Callable[[Event], None]) -> None:
        run = Run(emit)
        self._run = run
        self._optimizers = OptimizerCalls(run)
        self._scalers = ScalerCalls(run, self._optimizers)
        self._backward = BackwardCalls(run)
        self._gradients = GradientCalls(run)
        self._files = FileCalls(run)

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        """Context manager: calls of torch, and operations, are events."""
        with contextlib.ExitStack() as stack:
            stack.callback(forget_replaced_functions)
            stack.enter_context(self._optimizers.observing_steps())
            # A function that two modules have stays one function: pickle looks it up in the module that it names.
            wrapped: dict[int, Function] = {}  # by the function's id: some of torch's have no hash
            # A class of scalers that the script defines or imports later: FSDP's scaler is one.
            observe_later = classmethod(functools.partial(self._observe_class, stack))
            stack.enter_context(replaced(torch.amp.GradScaler, __init_subclass__=observe_later))
            for observed in list(self._handlers()):
                function = vars(observed.owner).get(observed.name) or getattr(observed.owner, observed.name)
                if id(function) not in wrapped:
                    wrapped[id(function)] = self._wrap(function, observed)
                stack.enter_context(replaced(observed.owner, **{observed.name: wrapped[id(function)]}))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self._run.operations)
            # What the run imported from torch by name stays a wrapped function in its own modules.
            stack.callback(setattr, self._run, "is_quiet", True)
            yield

    def _observe_class(self, stack: contextlib.ExitStack, scaler_class: type) -> None:
        """Observe the methods of a class of scalers that was just defined, for the time of the run."""
        for observed in self._scalers.handlers_of(scaler_class):
            wrapped = self._wrap(vars(scaler_class)[observed.name], observed)
            stack.enter_context(replaced(scaler_class, **{observed.name: wrapped}))

    def _handlers(self) -> Iterator[Observed]:
        """Yield the functions that are observed, with the handlers of their calls."""
        yield from self._scalers.handlers()
        yield from self._optimizers.handlers()
        yield from self._backward.handlers()
        yield from self._gradients.handlers()
        yield from self._files.handlers()

    def _wrap(self, function: Function, observed: Observed) -> Function:
        """Wrap a function: its handler gets each call that is not made inside an observed one."""

        @functools.wraps(function)
        def wrapped(*args: object, **kwargs: object) -> object:
            if self._run.is_quiet:
                return function(*args, **kwargs)
            return observed.handler(function, *args, **kwargs)

        return wrapped
