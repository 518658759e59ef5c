"""Calls that write files."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from funcamp.report import events
from funcamp.report.calls.observed import Function, Observed
from funcamp.report.calls.run import Calls
from funcamp.report.file_contents import is_optimizer, parts_of
from funcamp.report.lines import calling_line


class FileCalls(Calls):
    """Handles the calls of `torch.save`."""

    def handlers(self) -> Iterator[Observed]:
        """Yield the functions that are observed, with the handlers of their calls."""
        for owner in (torch, torch.serialization):
            yield Observed(owner, "save", self._save)

    def _save(self, function: Function, obj: object, *args: object, **kwargs: object) -> object:
        line = calling_line()
        parts = list(parts_of(obj))
        self._emit(events.FileSaved(line, any(map(is_optimizer, parts))))
        numbers = [part for part in parts if isinstance(part, (int, float))]
        for scaler, scale in self._run.read_scales.items():
            if scale in numbers:  # saved without state_dict
                self._emit(events.ScalerSaved(line, scaler))
        return function(obj, *args, **kwargs)  # not quietly: it may pickle a scaler, which is an event
