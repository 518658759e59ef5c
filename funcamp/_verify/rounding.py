"""How much two runs of the same training differ, and how much of that rounding can explain."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

#: Values of one step by name, on the host: params.*, opt_state.*, scaler.scale, metrics.loss and so on.
Row = dict[str, Tensor]


def copied_to_host(row: Row) -> Row:
    """Return copies of the values of a row, on the host. Syncs."""
    return {name: value.detach().to("cpu", copy=True) for name, value in row.items()}


#: Two runs may differ by this multiple of what disturbed runs do.
_FACTOR = 2.0
#: A value is noise if disturbed runs differ by this part of what it has moved: the largest of a few such differences
#: says little about the next. A wrong program shows in another value, or in an earlier step.
_NOISE = 0.25
#: Noise may differ by any number, but not by inf or NaN (see `distance`).
_ANY_NUMBER = 1e100
#: Two runs may always differ by this many units in the last place of a value.
_ULPS = 16.0


class Difference(NamedTuple):
    """The largest difference in the first step in which two runs differ by more than rounding, or at all."""

    step: int
    name: str
    size: float
    """The norm of the difference over the norm of what the reference has changed since the start."""
    allowed: float
    """What rounding may do, in the same unit."""

    @property
    def share(self) -> float:
        """Return the difference relative to what rounding may do; above 1 rounding does not explain it."""
        return self.size / self.allowed if self.allowed else math.inf


class Rounding:
    """How far runs with disturbed parameters end up from the eager step: the yardstick for differences.

    Args:
        reference: the run of the eager step.
        disturbed: the same run several times, each with other small changes of its parameters.
        start: the values before the first step.
    """

    def __init__(self, reference: list[Row], disturbed: list[list[Row]], start: Row) -> None:
        self._start = start
        self._allowed: list[defaultdict[str, float]] = []
        """By step and name, how far a value may be from the reference's."""
        largest: defaultdict[str, float] = defaultdict(float)
        for number, row in enumerate(reference):
            others = [run[number] for run in disturbed]
            if any(other["metrics.found_inf"] != row["metrics.found_inf"] for other in others):
                break
            allowed: defaultdict[str, float] = defaultdict(float)
            for name, value in row.items():
                # A disturbed run may come near the reference by chance, so those of earlier steps count too.
                largest[name] = max(largest[name], *[distance(value, other[name]) for other in others])
                allowed[name] = _FACTOR * largest[name] + _ulps(value)
                if largest[name] >= _NOISE * self._movement(name, value):
                    allowed[name] = max(_ANY_NUMBER, allowed[name])
            self._allowed.append(allowed)
        # After a step that one run skips and another takes, nothing can be compared.
        lost = len(reference) - len(self._allowed)
        self._allowed += [defaultdict(lambda: math.inf)] * lost

    @property
    def noisy_step(self) -> int | None:
        """Return the first step whose gradients are noise, or which one run skips and another takes."""
        norms = [allowed["metrics.grad_norm"] for allowed in self._allowed]
        return next((number for number, allowed in enumerate(norms) if allowed >= _ANY_NUMBER), None)

    def _movement(self, name: str, value: Tensor) -> float:
        """Return how far a value is from where it started; its size, if it did not start or did not move."""
        moved = distance(value, self._start[name]) if name in self._start else 0.0
        return moved or _norm(value) or 1.0

    def difference(self, number: int, reference: Row, row: Row) -> Difference | None:
        """Return the largest difference of a row from the reference's; None if all values are equal."""
        differences: list[Difference] = []
        for name, value in reference.items():
            size = distance(value, row[name]) if name in row else math.inf
            if size:
                movement = self._movement(name, value)
                differences.append(Difference(number, name, size / movement, self._allowed[number][name] / movement))
        return max(differences, key=lambda difference: (difference.share, difference.size), default=None)


def distance(one: Tensor, other: Tensor) -> float:
    """Return the 2-norm of a difference; 0 for equal values; infinity if shapes, dtypes, or inf and NaN differ."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    return float(torch.linalg.vector_norm(_wide(one, 1e200) - _wide(other, 1e200)))


def _ulps(value: Tensor) -> float:
    """Return what two runs may always differ by: nothing for integers."""
    is_rounded = value.is_floating_point() or value.is_complex()
    return _ULPS * torch.finfo(value.dtype).eps * _norm(value) if is_rounded else 0.0


def _norm(value: Tensor) -> float:
    """Return the 2-norm of the finite part of a value."""
    return float(torch.linalg.vector_norm(_wide(value, 0.0)))


def _wide(value: Tensor, infinity: float) -> Tensor:
    """Return a value in float64, with numbers in place of inf and NaN."""
    real = torch.view_as_real(value) if value.is_complex() else value
    return real.double().nan_to_num(nan=infinity / 2, posinf=infinity, neginf=-infinity)
