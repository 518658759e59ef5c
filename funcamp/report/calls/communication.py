"""Calls that communicate between ranks: of torch.distributed, and of DDP models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from funcamp.report import events
from funcamp.report.calls.observed import Function, Observed
from funcamp.report.calls.run import Run
from funcamp.report.derived import Derived
from funcamp.report.lines import calling_line
from funcamp.report.tensors import tensors_in

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

#: The functions of torch.distributed whose results are numbers of all ranks. The last two are new in torch 2.13.
_GATHERING = {"all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"}
_GATHERING |= {"all_gather_single", "reduce_scatter_single"}


class CommunicationCalls:
    """Handles the calls that communicate between ranks."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._emit = run.emit
        self._tracked = run.tracked
        self._quietly = run.nesting.quietly

    def handlers(self) -> Iterator[Observed]:
        """Yield the functions that are observed, with the handlers of their calls."""
        if not torch.distributed.is_available():
            return
        for owner in (torch.distributed, torch.distributed.distributed_c10d):
            for name in ("all_reduce", "all_reduce_coalesced", "reduce"):
                yield Observed(owner, name, self._reduce)
            for name in vars(owner).keys() & _GATHERING:
                yield Observed(owner, name, self._gather)
        yield Observed(nn.parallel.DistributedDataParallel, "__init__", self._make_replica)
        reducer_class = torch.distributed.Reducer  # type: ignore[attr-defined]
        yield Observed(reducer_class, "prepare_for_backward", self._prepare_reducer)

    def _reduce(self, function: Function, *args: object, **kwargs: object) -> object:
        reduced = args[0] if args else kwargs.get("tensor", kwargs.get("tensors", ()))
        for tensor in tensors_in(reduced):
            keys = self._tracked.gradients_among([tensor])
            if keys:
                self._emit(events.Reduced(calling_line(), keys))
            else:
                self._note_reduced([tensor], self._tracked.derived(tensor))
        return self._quietly(function, *args, **kwargs)

    def _gather(self, function: Function, *args: object, **kwargs: object) -> object:
        outputs, tensors = args[:2] if len(args) > 1 else ((), ())  # only if both are positional
        derived = self._tracked.derived(tensors)
        result = self._quietly(function, *args, **kwargs)
        self._note_reduced(tensors_in(outputs), derived)
        return result

    def _note_reduced(self, tensors: list[Tensor], derived: Derived | None) -> None:
        """Note that tensors that are computed from gradients have numbers of all ranks now."""
        if derived is not None:
            for tensor in tensors:
                self._tracked.remember_derived(tensor, derived._replace(reduced_line=calling_line()))

    def _make_replica(
        self, function: Function, model: DistributedDataParallel, *args: object, **kwargs: object
    ) -> None:
        function(model, *args, **kwargs)
        self._run.replicas.add(model)

    def _prepare_reducer(self, function: Function, reducer: object, *args: object, **kwargs: object) -> None:
        self._run.replicas.prepare(reducer)
        function(reducer, *args, **kwargs)
