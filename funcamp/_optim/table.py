"""A schedule that looks its values up in a tensor, at the count of applied steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcamp import _upstream
from funcamp._optim.modes import without_modes
from funcamp._scaler.state import wide_dtype
from funcamp._trace.tracing import compiling


class Table:
    """A hyperparameter's values after 0, 1, 2, ... applied steps; after those, the last one.

    float64, as Python's numbers are; float32 on MPS, which has no float64.
    """

    def __init__(self, values: Sequence[float], source: str) -> None:
        with without_modes():
            self._values = torch.tensor(values, dtype=torch.float64, device="cpu")
        # Made here: in a trace the tensor cannot be read.
        self._text = f"<{source}: {len(values)} values, {values[0]!r} to {values[-1]!r}>"
        self._copies: dict[torch.device, Tensor] = {}

    def __repr__(self) -> str:
        return self._text

    def __getstate__(self) -> dict[str, Any]:
        # The copies are made again when the unpickled table is called.
        return {**vars(self), "_copies": {}}

    def __call__(self, applied: Tensor) -> Tensor:
        """Return the value after some applied steps, shape (), on the count's device. No sync."""
        values = self._on(applied.device)
        index = applied.clamp(0, len(values) - 1)
        return values.index_select(0, index.reshape(1)).reshape(())

    def _on(self, device: torch.device) -> Tensor:
        """Return the values on a device; they are copied there once, by `init` or the first step."""
        if device.type == "cpu":
            return self._values
        if device in self._copies:
            return self._copies[device]
        dtype = wide_dtype(device)
        if compiling():  # without an eager call before: then the copy is a part of the program
            return self._values.to(device, dtype)
        with without_modes():
            copy = self._values.to(device, dtype)
        if not _upstream.is_wrapped(copy):  # a wrapper of torch.func must not outlive the call
            self._copies[device] = copy
        return copy
