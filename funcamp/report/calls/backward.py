"""Calls that differentiate: `backward` and `torch.autograd.grad`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from funcamp.report import events
from funcamp.report.autograd_graph import Scaling, read_graph
from funcamp.report.calls.observed import Function, Observed
from funcamp.report.calls.run import Calls, Run
from funcamp.report.lines import calling_line
from funcamp.report.tensors import all_finite, is_zero, tensors_in
from funcamp.report.torch_names import current_node, replaced


class BackwardCalls(Calls):
    """Handles the calls that differentiate."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._outer_scaling: Scaling | None = None
        """The scaling of the backward pass that runs now."""
        self._last_scaling: Scaling | None = None
        """The scaling of the last backward pass that had one."""
        self._is_first = True
        """Whether no backward pass has run."""
        self._has_taken_overflow = False
        """Whether `torch.autograd.grad` of a scaled loss has made inf or NaN."""

    def handlers(self) -> Iterator[Observed]:
        """Yield the functions that are observed, with the handlers of their calls."""
        yield Observed(torch.autograd, "backward", self._backward)
        yield Observed(torch.autograd, "grad", self._grad)

    def _backward(
        self,
        function: Function,
        tensors: object,
        grad_tensors: object = None,
        *args: object,
        **kwargs: object,
    ) -> object:
        if isinstance(tensors, Iterator):  # it can be read once
            tensors = list(tensors)
        outputs = tensors_in(tensors)
        graph = read_graph(outputs)
        inputs = args[3] if len(args) > 3 else kwargs.get("inputs")
        leaves = graph.leaves if inputs is None else tensors_in(inputs)
        initial_gradients = tensors_in(grad_tensors)
        is_nested = current_node() is not None  # as in a checkpoint whose forward pass runs again
        scaling = self._outer_scaling
        not_finite = ""
        if not is_nested:
            scaling = graph.scaling or self._indirect_scaling([*outputs, *initial_gradients])
            not_finite = self._find_not_finite(outputs, leaves, graph.scaling)
            self._last_scaling = scaling or self._last_scaling
            self._tracked.forget_derived()  # the loop may have unscaled earlier gradients since
            self._is_first = False
        # Before the pass runs: its hooks act on the gradients of this event.
        event = events.Backward(
            calling_line(),
            parameters=self._tracked.parameters(leaves),
            empty=frozenset([self._tracked.key(leaf) for leaf in leaves if is_zero(leaf.grad)]),
            scaler=None if scaling is None else scaling.scaler,
            dtypes=graph.dtypes,
            is_in_autocast=not is_nested and _is_in_autocast(outputs),
            has_products=graph.has_products,
            not_finite=not_finite,
        )
        self._emit(event)
        outer = replaced(self, _outer_scaling=scaling)
        with outer, replaced(self._run, in_backward=True), self._run.operations.paused():
            result = function(tensors, grad_tensors, *args, **kwargs)
        self._tracked.remember_gradients(leaves)
        return result

    def _indirect_scaling(self, tensors: list[Tensor]) -> Scaling | None:
        """Return the scaling of a pass whose loss no scaler has scaled; None if nothing else did.

        The loss, or its initial gradient, is computed from scaled gradients; or a scaler has scaled a factor of it.
        """
        if any(self._tracked.derived(tensor) is not None for tensor in tensors):
            return self._last_scaling
        return self._run.factor_scaling

    def _grad(self, function: Function, outputs: object, *args: object, **kwargs: object) -> object:
        if isinstance(outputs, Iterator):  # it can be read once
            outputs = list(outputs)
        result = function(outputs, *args, **kwargs)
        if current_node() is None:
            scaling = read_graph(tensors_in(outputs)).scaling if self._run.has_scaled else None
            self._emit(events.GradientsTaken(calling_line()))
            if scaling is not None:
                self._remember_taken(tensors_in(result), scaling)
        return result

    def _remember_taken(self, gradients: list[Tensor], scaling: Scaling) -> None:
        """Remember what `torch.autograd.grad` returned for a scaled loss."""
        for gradient in gradients:
            self._tracked.remember_gradient(self._tracked.key(gradient), gradient)
        self._last_scaling = scaling
        self._has_taken_overflow |= not all(map(all_finite, gradients))

    def _find_not_finite(self, outputs: list[Tensor], leaves: list[Tensor], scaling: Scaling | None) -> str:
        """Return what is not finite: "loss", in the first pass also "parameter", or "".

        A loss of which scaled gradients are a part, as of a penalty, may only have met a scale that is too high.
        """
        if self._is_first and not all(map(all_finite, leaves)):
            return "parameter"
        if self._has_taken_overflow:
            return ""
        # The product with the scale may overflow, so a scaled loss was checked before.
        is_finite = all(map(all_finite, outputs)) if scaling is None else self._run.loss_is_finite
        return "" if is_finite else "loss"


def _is_in_autocast(outputs: list[Tensor]) -> bool:
    """Return whether an autocast region is around this call, for the device of a loss."""
    devices = {output.device.type for output in outputs}
    return any(torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device) for device in devices)
