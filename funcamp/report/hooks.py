"""The hooks that a script registers on parameters. They run inside a backward pass, on gradients times the scale."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from funcamp.report.events import Event, Key
from funcamp.report.lines import is_called_by_torch
from funcamp.report.nesting import Nesting
from funcamp.report.tensors import address_of
from funcamp.report.torch_names import replaced
from funcamp.report.tracked import Tracked

#: A hook of a tensor. It gets the gradient and may return another one, or gets a parameter with its gradient.
Hook: TypeAlias = Callable[[Tensor], "Tensor | None"]


class ParameterHooks:
    """Wraps the hooks of parameters, so that what they do is reported.

    Their events wait until the backward pass has ended: the loop's state knows the gradients of a pass only after the
    event of the pass.

    Args:
        emit: gets the events of hooks after their backward pass.
        tracked: which tensors are gradients.
        nesting: what runs now.
        report_new_gradient: gets a parameter and the gradient by which a hook has replaced its gradient.
    """

    def __init__(
        self,
        emit: Callable[[Event], None],
        tracked: Tracked,
        nesting: Nesting,
        report_new_gradient: Callable[[Key, Tensor], None],
    ) -> None:
        self._emit = emit
        self._tracked = tracked
        self._nesting = nesting
        self._report_new_gradient = report_new_gradient
        self._deferred: list[Event] = []

    def forget(self) -> None:
        """Drop the events of passes that are not reported: of `torch.autograd.grad`, or of a pass that raised."""
        self._deferred.clear()

    def defer(self, event: Event) -> None:
        """Keep an event of a hook until its backward pass has ended."""
        self._deferred.append(event)

    def emit_deferred(self) -> None:
        """Report what hooks did in a backward pass that has ended and was reported."""
        if self._nesting.in_hook:  # a backward pass of a hook: the outer one has not ended
            return
        deferred = self._deferred
        self._deferred = []
        for event in deferred:
            self._emit(event)

    def wrap_hook(self, hook: Hook, tensor: Tensor) -> Hook:
        """Wrap a hook of `register_hook`, which gets the gradient and may return another one."""
        return self._wrap(hook, tensor, _gradient_returned)

    def wrap_hook_after(self, hook: Hook, tensor: Tensor) -> Hook:
        """Wrap a hook of `register_post_accumulate_grad_hook`, which gets the parameter."""
        return self._wrap(hook, tensor, _gradient_stored)

    def _wrap(self, hook: Hook, tensor: Tensor, gradient_of: Callable[[Tensor, Tensor | None], Tensor | None]) -> Hook:
        """Wrap a hook of a parameter; return torch's own hooks, and those of other tensors, as they are.

        gradient_of: returns the gradient, from the hook's argument and from what the hook returned (None before).
        """
        if not tensor.is_leaf or is_called_by_torch():
            return hook
        key = self._tracked.key(tensor)

        @functools.wraps(hook)
        def watched(argument: Tensor) -> Tensor | None:
            if self._nesting.is_quiet:
                return hook(argument)
            gradient = gradient_of(argument, None)
            in_hook = replaced(self._nesting, in_hook=True)
            with in_hook, self._nesting.mode.resumed(), self._tracked.hooked(gradient, key):
                result = hook(argument)
                new_gradient = gradient_of(argument, result)
                is_other = address_of(new_gradient) not in (0, address_of(gradient))
                if new_gradient is not None and is_other:
                    self._report_new_gradient(key, new_gradient)
            return result

        return watched


def _gradient_returned(gradient: Tensor, result: Tensor | None) -> Tensor | None:
    """Return the gradient after a hook of `register_hook`."""
    return gradient if result is None else result


def _gradient_stored(parameter: Tensor, _result: Tensor | None) -> Tensor | None:
    """Return the gradient before or after a hook of `register_post_accumulate_grad_hook`."""
    return parameter.grad
