"""A warning when step after step is skipped, in place of a silence in which nothing is learned."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: So many skipped steps in a row lower a scale of 2^16 below 1: it is not the scale that is at fault.
LIMIT = 20


class _Count(NamedTuple):
    """How many steps of an optimizer in a row were skipped, on its device."""

    optimizer: weakref.ref[Any]
    number: Tensor
    """Float32, shape ()."""


class SkipsInARow:
    """Warns once when `LIMIT` steps in a row were skipped.

    Args:
        call: what the warning begins with.
        depth: the number of functions between the user's line and `note`.
    """

    def __init__(self, call: str, depth: int) -> None:
        self._call = call
        self._depth = depth
        self._counts: dict[object, int] = {}
        """How many steps in a row were skipped, by optimizer."""
        self._device_counts: dict[int, _Count] = {}
        """The same, by the optimizer's address, if the host does not know whether its steps are skipped."""
        self._has_warned = False

    def note(self, optimizer: object, *, skipped: bool, describe: Callable[[], str]) -> None:
        """Count a step of an optimizer, and warn if it is the last of `LIMIT`.

        Args:
            optimizer: which one, as a key.
            skipped: whether its step was skipped.
            describe: returns what is not finite, for the warning; called only then.
        """
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1 if skipped else 0
        self.warn(self._counts[optimizer], describe)

    def __getstate__(self) -> dict[str, Any]:
        """Counts on a device belong to this process's optimizers."""
        return vars(self) | {"_device_counts": {}}

    def note_on_device(self, optimizer: Any, flag: Tensor) -> None:
        """Count a step of an optimizer on its device; `look` warns. No sync. In a CUDA graph nothing is counted.

        flag: 1.0 if the step is skipped, else 0.0; shape ().
        """
        if self._has_warned:
            return
        if flag.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # a graph may be replayed longer than the count exists
        count = self._device_counts.get(id(optimizer))
        if count is None or count.optimizer() is not optimizer or count.number.device != flag.device:
            count = _Count(weakref.ref(optimizer), torch.zeros_like(flag))
            self._device_counts[id(optimizer)] = count
        with torch.no_grad():
            torch.addcmul(flag, count.number, flag, out=count.number)  # 0 if the flag is, else one more

    def look(self, describe: Callable[[Any], str]) -> None:
        """Read the counts on devices, and warn if one has reached `LIMIT`.

        describe: returns what is not finite in an optimizer's gradients.

        To be called by the function that the user calls.
        """
        if self._has_warned:
            return
        for count in self._device_counts.values():
            optimizer = count.optimizer()
            if optimizer is not None:
                self.warn(int(count.number.item()), functools.partial(describe, optimizer), depth=2)

    def warn(self, count: int, describe: Callable[[], str], depth: int | None = None) -> None:
        """Warn if so many steps in a row were skipped, and no warning came before.

        depth: as for the class, which it replaces.
        """
        if count < LIMIT or self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"{self._call}: {count} steps in a row were skipped, so nothing is learned: {describe()}. No scale "
            "helps if the loss is not finite or a gradient is inf or NaN at each scale; "
            "`python -m funcamp report script.py` names the operation",
            stacklevel=(self._depth if depth is None else depth) + 2,
        )
