"""Calls that differentiate: `backward` and `torch.autograd.grad`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from funcamp.report import events
from funcamp.report.autograd_graph import Graph, Scaling, nonfinite_node_of, read_graph
from funcamp.report.calls.observed import Function, Observed
from funcamp.report.calls.run import SKIPS_BEFORE_SEARCH, Run
from funcamp.report.events import Key, Reduction
from funcamp.report.lines import calling_line, calling_places
from funcamp.report.nesting import current_node
from funcamp.report.powers import combined
from funcamp.report.tensors import all_finite, is_zero, tensors_in
from funcamp._upstream.modes import without_modes
from funcamp._upstream.replaced import replaced

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
    """Whether it runs inside another pass."""
    has_one_as_initial: bool
    """Whether it begins with gradients of 1, as that of a loss does."""
    not_finite: str
    """For the first pass of the run: "loss" or "parameter" if that is not finite."""
    retains_graph: bool
    synced: frozenset[Key]
    """The parameters of DDP models whose gradients it will sum over ranks."""


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
        self._passes = 0
        """The number of backward passes, without those inside another one."""
        self._has_taken_overflow = False
        """Whether `torch.autograd.grad` of a scaled loss made inf or NaN before the first pass."""

    def handlers(self) -> Iterator[Observed]:
        """Yield the functions that are observed, with the handlers of their calls."""
        yield Observed(torch.autograd, "backward", self._backward, is_of_loop=True)
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
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(self, _outer_scaling=backward.scaling))
            stack.enter_context(replaced(self._run.nesting, in_backward=True))
            is_searched = max(self._run.skips.values(), default=0) >= SKIPS_BEFORE_SEARCH and not backward.is_nested
            nodes = stack.enter_context(nonfinite_node_of(backward.outputs)) if is_searched else []
            result = function(tensors, *args, inputs=inputs, **kwargs)
        if is_searched:
            self._run.nonfinite_node = nodes[0] if nodes else ""
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
        is_nested = current_node() is not None  # in a checkpoint whose forward pass runs again
        scaling = self._outer_scaling if is_nested else graph.scaling
        if not is_nested:
            scaling = scaling or self._indirect_scaling([*outputs, *initial_gradients])
            self._last_scaling = scaling or self._last_scaling
            self._run.hooks.forget()
            self._tracked.forget_powers()  # the loop may have unscaled earlier gradients since
        is_first = not is_nested and not self._passes
        return _Pass(
            outputs=outputs,
            leaves=leaves,
            empty=frozenset(self._tracked.key(leaf) for leaf in leaves if is_zero(leaf.grad)),
            graph=graph,
            scaling=scaling,
            is_nested=is_nested,
            has_one_as_initial=not is_nested and all(map(_is_one, initial_gradients)),
            not_finite=self._find_not_finite(outputs, leaves, graph.scaling) if is_first else "",
            retains_graph=retains_graph,
            synced=self._run.replicas.synced(),
        )

    def _end_pass(self, backward: _Pass) -> None:
        """Report a backward pass that has ended, and then what hooks did in it."""
        views = [*self._tracked.views_of_gradients(backward.leaves)]
        leaves = [*backward.leaves, *[parameter for parameter, _ in views]]
        keys = self._tracked.parameters(leaves)
        empty = {self._tracked.key(parameter) for parameter, leaf in views if self._tracked.key(leaf) in backward.empty}
        self._passes += not backward.is_nested
        self._tracked.remember_gradients(leaves)
        self._run.replicas.end_pass(keys)
        scaling, graph = backward.scaling, backward.graph
        self._emit(
            events.Backward(
                calling_line(),
                parameters=keys,
                empty=backward.empty | empty,
                scaler=None if scaling is None else scaling.scaler,
                dtypes=graph.dtypes,
                reduction=graph.reduction if backward.has_one_as_initial else Reduction.OTHER,
                autocast_dtype=None if backward.is_nested else _autocast_dtype(backward.outputs),
                has_products=graph.has_products,
                places=calling_places(),
                not_finite=backward.not_finite,
                nonfinite_input=self._run.operations.nonfinite_input,
                retains_graph=backward.retains_graph,
                synced=backward.synced,
                unsynced=self._run.replicas.parameters().intersection(keys) - backward.synced,
            )
        )
        self._run.hooks.emit_deferred()

    def _indirect_scaling(self, tensors: list[Tensor]) -> Scaling | None:
        """Return the scaling of a pass whose loss no scaler has scaled; None if nothing else did.

        The loss, or its initial gradient, is computed from scaled gradients; or a scaler has scaled a factor of it.
        """
        powers = [power for power in map(self._tracked.power_of, tensors) if power is not None and power.degree == 1]
        if powers:
            self._emit(events.ReadsCancelled(calling_line(), combined(powers, 1.0).read_ids))
            return self._last_scaling
        return self._run.factor_scaling

    def _grad(self, function: Function, outputs: object, *args: object, **kwargs: object) -> object:
        if isinstance(outputs, Iterator):  # it can be read once
            outputs = list(outputs)
        if current_node() is None:
            scaling = read_graph(tensors_in(outputs)).scaling if self._run.has_scaled else None
            self._emit(events.GradientsTaken(calling_line(), None if scaling is None else scaling.scaler))
            if scaling is not None:
                return self._take_gradients(function, scaling, outputs, *args, **kwargs)
        return function(outputs, *args, **kwargs)

    def _take_gradients(
        self, function: Function, scaling: Scaling, outputs: object, *args: object, **kwargs: object
    ) -> object:
        """Call `torch.autograd.grad` for a scaled loss, and remember what it returns."""
        inputs = args[0] if args else kwargs.pop("inputs", ())
        leaves = tensors_in(inputs)  # a generator can be read once
        result = function(outputs, leaves if isinstance(inputs, Iterator) else inputs, *args[1:], **kwargs)
        if isinstance(result, tuple):
            pairs = [(gradient, leaf) for gradient, leaf in zip(result, leaves) if isinstance(gradient, Tensor)]
            self._tracked.remember_taken([pair[0] for pair in pairs], [pair[1] for pair in pairs], scaling)
            self._last_scaling = scaling
            if not self._passes:
                self._has_taken_overflow |= not all(all_finite(gradient) for gradient, _ in pairs)
        return result

    def _find_not_finite(self, outputs: list[Tensor], leaves: list[Tensor], scaling: Scaling | None) -> str:
        """Return what is not finite in the first pass: "parameter", "loss" or "".

        A loss of which scaled gradients are a part, as of a penalty, may only have met a scale that is too high.
        """
        if not all(all_finite(leaf) for leaf in leaves):
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
