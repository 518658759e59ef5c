"""The hooks that a script registers on parameters. They run inside a backward pass, on gradients times the scale."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from funcamp.report.calls.run import Run
from funcamp.report.lines import is_called_by_torch
from funcamp.report.tensors import address_of
from funcamp.report.torch_names import replaced

#: A hook of a tensor. It gets the gradient and may return another one, or gets a parameter with its gradient.
Hook: TypeAlias = Callable[[Tensor], "Tensor | None"]
#: Returns the gradient, from a hook's argument and from what the hook returned; None before.
GradientOf: TypeAlias = Callable[[Tensor, "Tensor | None"], "Tensor | None"]


def watched(run: Run, hook: Hook, tensor: Tensor, gradient_of: GradientOf) -> Hook:
    """Return a hook of a parameter that reports what it does; torch's own, and those of other tensors, as they are."""
    if not tensor.is_leaf or is_called_by_torch():
        return hook
    key = run.tracked.key(tensor)

    @functools.wraps(hook)
    def call(argument: Tensor) -> Tensor | None:
        if run.is_quiet:
            return hook(argument)
        gradient = gradient_of(argument, None)
        if gradient is not None:
            run.tracked.remember_gradient(key, gradient)
        with replaced(run, in_hook=True), run.operations.resumed():
            result = hook(argument)
            new_gradient = gradient_of(argument, result)
            is_other = address_of(new_gradient) not in (0, address_of(gradient))
            if new_gradient is not None and is_other:
                run.report_new_gradient(key, new_gradient)
        return result

    return call


def gradient_returned(gradient: Tensor, result: Tensor | None) -> Tensor | None:
    """Return the gradient before or after a hook of `register_hook`, which gets it and may return another one."""
    return gradient if result is None else result


def gradient_stored(parameter: Tensor, _result: Tensor | None) -> Tensor | None:
    """Return the gradient before or after a hook of `register_post_accumulate_grad_hook`, which gets the parameter."""
    return parameter.grad
