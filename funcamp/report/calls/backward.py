"""Calls that differentiate: `backward` and `torch.autograd.grad`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from funcamp.report import events
from funcamp.report.autograd_graph import Graph, Scaling, read_graph
from funcamp.report.calls.observed import Function, Observed
from funcamp.report.calls.run import Run
from funcamp.report.events import Key, Reduction
from funcamp.report.lines import calling_line, calling_places
from funcamp.report.tensors import all_finite, is_zero, tensors_in
from funcamp.report.torch_names import current_node, replaced, without_modes

#: The number of arguments of `torch.autograd.backward` between the tensors and `inputs`.
_PLACE_OF_INPUTS = 4


class _Pass(NamedTuple):
    """What is known about a backward pass before it runs."""

    outputs: list[Tensor]
    """The losses."""
    leaves: list[Tensor]
    """The tensors to whose gradients it adds."""
    empty: frozenset[Key]
    """The leaves that have no gradient, or zeros."""
    graph: Graph
    scaling: Scaling | None
    is_nested: bool
    """Whether it runs inside another pass, as in a checkpoint whose forward pass runs again."""
    has_one_as_initial: bool
    """Whether it begins with gradients of 1, as that of a loss does."""
    not_finite: str
    """For the first pass of the run: "loss" or "parameter" if that is not finite."""
    retains_graph: bool


class BackwardCalls:
    """Handles the calls that differentiate."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._emit = run.emit
        self._tracked = run.tracked
        self._outer_scaling: Scaling | None = None
        """The scaling of the backward pass that runs now."""
        self._last_scaling: Scaling | None = None
        """The scaling of the last backward pass that had one."""
        self._is_first = True
        """Whether no backward pass has run."""
        self._has_taken_overflow = False
        """Whether `torch.autograd.grad` of a scaled loss made inf or NaN before the first pass."""

    def handlers(self) -> Iterator[Observed]:
        """Yield the functions that are observed, with the handlers of their calls."""
        yield Observed(torch.autograd, "backward", self._backward)
        yield Observed(torch.autograd, "grad", self._grad)

    def _backward(
        self, function: Function, tensors: object, *args: object, inputs: object = None, **kwargs: object
    ) -> object:
        if len(args) > _PLACE_OF_INPUTS:
            inputs = args[_PLACE_OF_INPUTS]
            args = args[:_PLACE_OF_INPUTS]
        if isinstance(tensors, Iterator):  # it can be read once
            tensors = list(tensors)
        backward = self._begin_pass(
            outputs=tensors_in(tensors),
            inputs=None if inputs is None else tensors_in(inputs),
            initial_gradients=tensors_in(args[0] if args else kwargs.get("grad_tensors")),
            retains_graph=bool(args[1] if len(args) > 1 else kwargs.get("retain_graph")),
        )
        nesting = self._run.nesting
        with (
            replaced(self, _outer_scaling=backward.scaling),
            replaced(nesting, in_backward=True),
            nesting.mode.paused(),
        ):
            result = function(tensors, *args, inputs=inputs, **kwargs)
        self._end_pass(backward)
        return result

    def _begin_pass(
        self,
        *,
        outputs: list[Tensor],
        inputs: list[Tensor] | None,
        initial_gradients: list[Tensor],
        retains_graph: bool,
    ) -> _Pass:
        """Return what is known about a backward pass before it runs.

        Args:
            outputs: the losses.
            inputs: the tensors to whose gradients it adds; None for all leaves of the graph.
            initial_gradients: those of the losses; none for 1.
            retains_graph: whether the graph is kept.
        """
        graph = read_graph(outputs)
        leaves = graph.leaves if inputs is None else inputs
        is_nested = current_node() is not None
        scaling = self._outer_scaling if is_nested else graph.scaling
        if not is_nested:
            scaling = scaling or self._indirect_scaling([*outputs, *initial_gradients])
            self._last_scaling = scaling or self._last_scaling
            self._run.hooks.forget()
            self._tracked.forget_derived()  # the loop may have unscaled earlier gradients since
        not_finite = ""
        if self._is_first and not is_nested:
            self._is_first = False
            not_finite = self._find_not_finite(outputs, leaves, graph.scaling)
        return _Pass(
            outputs=outputs,
            leaves=leaves,
            empty=frozenset([self._tracked.key(leaf) for leaf in leaves if is_zero(leaf.grad)]),
            graph=graph,
            scaling=scaling,
            is_nested=is_nested,
            has_one_as_initial=not is_nested and all(map(_is_one, initial_gradients)),
            not_finite=not_finite,
            retains_graph=retains_graph,
        )

    def _end_pass(self, backward: _Pass) -> None:
        """Report a backward pass that has ended, and then what hooks did in it."""
        keys = self._tracked.parameters(backward.leaves)
        self._tracked.remember_gradients(backward.leaves)
        scaling, graph = backward.scaling, backward.graph
        self._emit(
            events.Backward(
                calling_line(),
                parameters=keys,
                empty=backward.empty,
                scaler=None if scaling is None else scaling.scaler,
                dtypes=graph.dtypes,
                reduction=graph.reduction if backward.has_one_as_initial else Reduction.OTHER,
                autocast_dtype=None if backward.is_nested else _autocast_dtype(backward.outputs),
                has_products=graph.has_products,
                places=calling_places(),
                not_finite=backward.not_finite,
                retains_graph=backward.retains_graph,
            )
        )
        self._run.hooks.emit_deferred()

    def _indirect_scaling(self, tensors: list[Tensor]) -> Scaling | None:
        """Return the scaling of a pass whose loss no scaler has scaled; None if nothing else did.

        The loss, or its initial gradient, is computed from scaled gradients; or a scaler has scaled a factor of it.
        """
        known = [derived for derived in map(self._tracked.derived, tensors) if derived is not None]
        if known:
            read_ids = tuple([read_id for derived in known for read_id in derived.read_ids])
            self._emit(events.ReadsCancelled(calling_line(), read_ids))
            return self._last_scaling
        return self._run.factor_scaling

    def _grad(self, function: Function, outputs: object, *args: object, **kwargs: object) -> object:
        if isinstance(outputs, Iterator):  # it can be read once
            outputs = list(outputs)
        result = function(outputs, *args, **kwargs)
        if current_node() is None:
            scaling = read_graph(tensors_in(outputs)).scaling if self._run.has_scaled else None
            self._emit(events.GradientsTaken(calling_line(), None if scaling is None else scaling.scaler))
            if scaling is not None:
                self._remember_taken(tensors_in(result), scaling)
        return result

    def _remember_taken(self, gradients: list[Tensor], scaling: Scaling) -> None:
        """Remember what `torch.autograd.grad` returned for a scaled loss."""
        self._tracked.remember_taken(gradients)
        self._last_scaling = scaling
        if self._is_first:
            self._has_taken_overflow |= not all(map(all_finite, gradients))

    def _find_not_finite(self, outputs: list[Tensor], leaves: list[Tensor], scaling: Scaling | None) -> str:
        """Return what is not finite in the first pass: "parameter", "loss" or "".

        A loss of which scaled gradients are a part, as of a penalty, may only have met a scale that is too high.
        """
        if not all(map(all_finite, leaves)):
            return "parameter"
        if self._has_taken_overflow:
            return ""
        # The product with the scale may overflow, so a scaled loss was checked before.
        is_finite = all(map(all_finite, outputs)) if scaling is None else self._run.loss_is_finite
        return "" if is_finite else "loss"


def _autocast_dtype(outputs: list[Tensor]) -> torch.dtype | None:
    """Return the dtype of the autocast region around this call, for the device of a loss; None outside of autocast."""
    for output in outputs:
        device = output.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None


def _is_one(initial_gradient: Tensor) -> bool:
    """Return whether an initial gradient is 1, as that of a loss is."""
    with without_modes():
        return initial_gradient.dim() == 0 and bool(initial_gradient == 1)
