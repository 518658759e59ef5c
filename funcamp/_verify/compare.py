"""How far two runs of the same training are apart, and how far rounding alone may take them."""

from __future__ import annotations

import copy
import math
import statistics
from typing import NamedTuple

import torch
from torch import Tensor

#: Values of one step by name: loss, found_inf, scaler.scale, params.*, buffers.*, opt_state.*, metrics.*.
Row = dict[str, Tensor]

#: Two runs may differ by this multiple of what a change of one unit in the last place does.
_FACTOR = 4.0
#: A value that one unit in the last place changes by this part of its movement or more says nothing: a gradient that is
#: zero but for rounding (a bias before BatchNorm), or training that has become chaotic.
_NOISE = 0.25
#: Two runs may always differ by this many units in the last place.
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
    def is_rounding(self) -> bool:
        """Return whether rounding explains it."""
        return self.size <= self.allowed

    @property
    def share(self) -> float:
        """Return the difference as a part of what rounding may do."""
        return self.size / self.allowed if self.allowed else math.inf


class Rounding:
    """What one unit in the last place does to every value, step by step: the yardstick for differences.

    Args:
        reference: the run.
        disturbed: the same run with inputs and parameters changed by one unit in the last place.
        start: the values before the first step.
    """

    def __init__(self, reference: list[Row], disturbed: list[Row], start: Row) -> None:
        self._reference, self._start = reference, start
        self._allowed: list[dict[str, float]] = []
        self.first_other_skip = len(reference)
        """The first step that only one of the two runs skips: from there on rounding explains everything."""
        usual: dict[str, float] = {}
        for number, (row, other) in enumerate(zip(reference, disturbed)):
            if self.first_other_skip == len(reference) and not is_same(row["found_inf"], other["found_inf"]):
                self.first_other_skip = number
            sizes = {name: self._size(number, name, other[name]) for name in row if name in other}
            by_kind: dict[str, list[float]] = {}
            for name, size in sizes.items():
                by_kind.setdefault(_kind(name), []).append(size)
            # One disturbed run may come near the reference by chance: what it was before counts too.
            for kind, found in by_kind.items():
                usual[kind] = max(usual.get(kind, 0.0), max(found) if kind == _SCALARS else statistics.median(found))
            floors = {name: self._floor(number, name) for name in sizes}
            self._allowed.append(
                {name: self._allowance(size, usual[_kind(name)], floors[name]) for name, size in sizes.items()}
            )

    @staticmethod
    def _allowance(size: float, usual: float, floor: float) -> float:
        """Return what rounding may do to a value that one ulp changes by `size`, and its kind by `usual`."""
        if size >= _NOISE:
            return math.inf
        return floor + min(_FACTOR * max(size, usual), 2 * _NOISE)

    @property
    def noise(self) -> tuple[int, int]:
        """The number of floating-point values that are lost in rounding, in the worst step, and of all."""
        floats = [name for name, value in self._reference[-1].items() if value.is_floating_point()]
        lost = [sum(allowed.get(name) == math.inf for name in floats) for allowed in self._allowed]
        return max(lost), len(floats)

    def against(self, reference: list[Row]) -> Rounding:
        """Return the same yardstick for differences from another run."""
        other = copy.copy(self)
        other._reference = reference
        return other

    def difference(self, number: int, row: Row) -> Difference | None:
        """Return the largest difference of a step from the reference; None if all values are equal."""
        reference, worst = self._reference[number], None
        for name, value in reference.items():
            if name not in row:
                return Difference(number, f"{name}, which is missing,", math.inf, 0.0)
            if is_same(value, row[name]) or (name == _SUMMED_OTHERWISE and self._size(number, name, row[name]) < 1e-6):
                continue
            if number >= self.first_other_skip:
                allowed = math.inf
            elif (value.is_floating_point() or value.is_complex()) and name not in _EXACT:
                allowed = self._allowed[number].get(name, self._floor(number, name))
            else:
                allowed = 0.0
            found = Difference(number, name, self._size(number, name, row[name]), allowed)
            if worst is None or (found.share, found.size) > (worst.share, worst.size):
                worst = found
        return worst

    def _movement(self, number: int, name: str) -> float:
        """Return how far a value is from where it started; its size, if it did not start or did not move."""
        value, start = self._reference[number][name], self._start.get(name)
        moved = 0.0 if start is None else _distance(value, start)
        return moved or _norm(value) or 1.0

    def _size(self, number: int, name: str, value: Tensor) -> float:
        reference = self._reference[number][name]
        return 0.0 if is_same(reference, value) else _distance(reference, value) / self._movement(number, name)

    def _floor(self, number: int, name: str) -> float:
        value = self._reference[number][name]
        if not (value.is_floating_point() or value.is_complex()):
            return 0.0
        return _ULPS * torch.finfo(value.dtype).eps * _norm(value) / self._movement(number, name)


#: The norm of all gradients, which a step sums in float64.
_SUMMED_OTHERWISE = "grad_norm"
#: What torch's loop and a step must have in common to the bit, unless one unit in the last place changes it too.
_EXACT = frozenset({"found_inf", "scaler.scale", "scaler.growth_tracker"})


#: The kind of the loss and of the gradients' norm.
_SCALARS = "scalars"


def _kind(name: str) -> str:
    """Return the first part of a name, such as "params", and the entry's name for an optimizer's state."""
    parts = name.split(".")
    if name in ("loss", _SUMMED_OTHERWISE):
        return _SCALARS
    return ".".join(parts[:3]) if parts[0] == "opt_state" else parts[0]


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _norm(value: Tensor) -> float:
    """Return the 2-norm of the finite part of a value. Syncs."""
    wide = _wide(value)
    return float(torch.linalg.vector_norm(torch.where(torch.isfinite(wide), wide, 0)))


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the 2-norm of a difference; infinity if shapes, dtypes, or the places of inf and NaN differ. Syncs."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    first, second = _wide(one), _wide(other)
    finite = torch.isfinite(first)
    if not torch.equal(finite, torch.isfinite(second)):
        return math.inf
    return float(torch.linalg.vector_norm(torch.where(finite, first - second, 0)))


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have equal values; NaN equals NaN. Syncs."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype not in _COMPARABLE:  # torch compares no float8 and no complex32
        one, other = _wide(one), _wide(other)
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


_COMPARABLE = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool)
) | frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


def changed_by_a_skip(number: int, before: Row, row: Row) -> Difference | None:
    """Return a parameter, moment or average that a skipped step has changed; None if there is none."""
    if not row["found_inf"].item():
        return None
    for name, value in row.items():
        of_training = name.startswith(("params.", "ema.")) or (name.startswith("opt_state.") and name in before)
        if of_training and not is_same(before[name], value):
            return Difference(number, f"{name}, which a skipped step changed,", math.inf, 0.0)
    return None
