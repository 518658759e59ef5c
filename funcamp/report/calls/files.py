"""Calls that write or read files."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from funcamp.report import events
from funcamp.report.calls.observed import Function, Observed
from funcamp.report.calls.run import Calls
from funcamp.report.file_contents import contains_optimizer, numbers_in
from funcamp.report.lines import calling_line


class FileCalls(Calls):
    """Handles the calls of `torch.save` and `torch.load`."""

    def handlers(self) -> Iterator[Observed]:
        """Yield the functions that are observed, with the handlers of their calls."""
        for owner in (torch, torch.serialization):
            yield Observed(owner, "save", self._save)
            yield Observed(owner, "load", self._load)

    def _save(self, function: Function, obj: object, *args: object, **kwargs: object) -> object:
        line = calling_line()
        self._emit(events.FileSaved(line, contains_optimizer(obj)))
        numbers = set(numbers_in(obj))
        for scaler, scale in self._run.read_scales.items():
            if scale in numbers:  # saved without state_dict
                self._emit(events.ScalerSaved(line, scaler))
        return function(obj, *args, **kwargs)  # not quietly: it may pickle a scaler, which is an event

    def _load(self, function: Function, *args: object, **kwargs: object) -> object:
        obj = function(*args, **kwargs)
        self._emit(events.FileLoaded(calling_line(), contains_optimizer(obj)))
        self._run.loaded_numbers |= set(numbers_in(obj))
        return obj
