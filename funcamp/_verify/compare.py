"""How much two runs of the same training differ, and how much of that rounding can explain."""

from __future__ import annotations

import copy
import math
import statistics
from typing import NamedTuple

import torch
from torch import Tensor

#: Values of one step by name: loss, found_inf, scaler.scale, params.*, buffers.*, opt_state.*, metrics.*.
Row = dict[str, Tensor]


def copied_to_host(row: Row) -> Row:
    """Return copies of the values of a row, on the host. Syncs."""
    return {name: value.detach().to("cpu", copy=True) for name, value in row.items()}


#: Two runs may differ by this multiple of what a change of one unit in the last place does.
_FACTOR = 4.0
#: A value is noise if one unit in the last place changes it by at least this part of its movement: a gradient that is
#: zero except for rounding (a bias before BatchNorm), or training that has become chaotic.
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
        """Return the difference relative to what rounding may do."""
        return self.size / self.allowed if self.allowed else math.inf

    def is_larger_than(self, other: Difference) -> bool:
        """Return whether this one is larger relative to what rounding may do; if that is equal, in size."""
        return (self.share, self.size) > (other.share, other.size)


class Rounding:
    """What one unit in the last place does to every value, step by step: the yardstick for differences.

    Args:
        reference: the run.
        disturbed: the same run with inputs and parameters changed by one unit in the last place.
        start: the values before the first step.
    """

    def __init__(self, reference: list[Row], disturbed: list[Row], start: Row) -> None:
        self._reference = reference
        self._start = start
        self._movements: dict[tuple[int, str], float] = {}
        """By step and name; each takes a pass over the values."""
        self._allowed: list[dict[str, float]] = []
        """By step and name, what rounding may do."""
        self.first_other_skip = len(reference)
        """The first step that only one of the two runs skips: from there on rounding explains everything."""
        usual_sizes: dict[str, float] = {}
        for number, (row, disturbed_row) in enumerate(zip(reference, disturbed)):
            only_one_skips = not is_same(row["found_inf"], disturbed_row["found_inf"])
            if only_one_skips and self.first_other_skip == len(reference):
                self.first_other_skip = number
            sizes: dict[str, float] = {}
            for name in row:
                if name in disturbed_row:
                    sizes[name] = self._size(number, name, disturbed_row[name])
            # One disturbed run may come near the reference by chance, so the sizes of earlier steps count too.
            for kind, size in _usual_sizes(sizes).items():
                usual_sizes[kind] = max(usual_sizes.get(kind, 0.0), size)
            allowed: dict[str, float] = {}
            for name, size in sizes.items():
                allowed[name] = self._allowance(size, usual_sizes[_kind(name)], self._floor(number, name))
            self._allowed.append(allowed)

    @staticmethod
    def _allowance(size: float, usual: float, floor: float) -> float:
        """Return what rounding may do to a value that one ulp changes by `size`, and its kind by `usual`."""
        if size >= _NOISE:
            return math.inf
        return floor + min(_FACTOR * max(size, usual), 2 * _NOISE)

    @property
    def noise(self) -> tuple[int, int]:
        """The number of floating-point values that are lost in rounding, in the worst step, and of all."""
        names = [name for name, value in self._reference[-1].items() if value.is_floating_point()]
        lost_by_step: list[int] = []
        for allowed in self._allowed:
            lost_by_step.append(sum(allowed.get(name) == math.inf for name in names))
        return max(lost_by_step), len(names)

    def against(self, reference: list[Row]) -> Rounding:
        """Return the same yardstick for differences from another run."""
        other = copy.copy(self)
        other._reference = reference
        other._movements = {}
        return other

    def difference(self, number: int, row: Row) -> Difference | None:
        """Return the largest difference of a step from the reference; None if all values are equal."""
        worst: Difference | None = None
        for name, value in self._reference[number].items():
            if name not in row:
                return Difference(number, f"{name}, which is missing,", math.inf, 0.0)
            if is_same(value, row[name]):
                continue
            size = self._size(number, name, row[name])
            if name == _SUMMED_OTHERWISE and size < _SUMMED_PRECISION:
                continue
            difference = Difference(number, name, size, self._allowed_for(number, name))
            if worst is None or difference.is_larger_than(worst):
                worst = difference
        return worst

    def _allowed_for(self, number: int, name: str) -> float:
        """Return what rounding may do to a value in a step."""
        if number >= self.first_other_skip:
            return math.inf
        value = self._reference[number][name]
        is_rounded = value.is_floating_point() or value.is_complex()
        if not is_rounded or name in _EXACT:
            return 0.0
        return self._allowed[number].get(name, self._floor(number, name))

    def _movement(self, number: int, name: str) -> float:
        """Return how far a value is from where it started; its size, if it did not start or did not move."""
        if (number, name) not in self._movements:
            value = self._reference[number][name]
            start = self._start.get(name)
            movement = 0.0 if start is None else _distance(value, start)
            self._movements[number, name] = movement or _norm(value) or 1.0
        return self._movements[number, name]

    def _size(self, number: int, name: str, value: Tensor) -> float:
        """Return the distance of a value from the reference's, relative to how far the reference has moved."""
        reference = self._reference[number][name]
        if is_same(reference, value):
            return 0.0
        return _distance(reference, value) / self._movement(number, name)

    def _floor(self, number: int, name: str) -> float:
        """Return what two runs may always differ by, in the unit of `_size`."""
        value = self._reference[number][name]
        if not (value.is_floating_point() or value.is_complex()):
            return 0.0
        return _ULPS * torch.finfo(value.dtype).eps * _norm(value) / self._movement(number, name)


#: The norm of all gradients, which a step sums in float64, and the largest relative error of other sums of it.
_SUMMED_OTHERWISE = "grad_norm"
_SUMMED_PRECISION = 1e-6
#: What torch's loop and a step must have in common to the bit, unless one unit in the last place changes it too.
_EXACT = frozenset({"found_inf", "scaler.scale", "scaler.growth_tracker"})


#: The kind of the loss and of the gradients' norm.
_SCALARS = "scalars"


def _usual_sizes(sizes: dict[str, float]) -> dict[str, float]:
    """Return for every kind of values the median of their sizes, of the scalars the largest."""
    sizes_by_kind: dict[str, list[float]] = {}
    for name, size in sizes.items():
        sizes_by_kind.setdefault(_kind(name), []).append(size)
    usual_sizes: dict[str, float] = {}
    for kind, sizes_of_kind in sizes_by_kind.items():
        usual_sizes[kind] = max(sizes_of_kind) if kind == _SCALARS else statistics.median(sizes_of_kind)
    return usual_sizes


def _kind(name: str) -> str:
    """Return the first part of a name, such as "params", and the entry's name for an optimizer's state."""
    parts = name.split(".")
    if name in ("loss", _SUMMED_OTHERWISE):
        return _SCALARS
    return ".".join(parts[:3]) if parts[0] == "opt_state" else parts[0]


def _wide(value: Tensor) -> Tensor:
    """Return a value in float64 or complex128."""
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _norm(value: Tensor) -> float:
    """Return the 2-norm of the finite part of a value. Syncs."""
    wide = _wide(value)
    return float(torch.linalg.vector_norm(torch.where(torch.isfinite(wide), wide, 0)))


def _distance(one: Tensor, other: Tensor) -> float:
    """Return the 2-norm of a difference; infinity if shapes, dtypes, or the places of inf and NaN differ. Syncs."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    first = _wide(one)
    second = _wide(other)
    finite = torch.isfinite(first)
    if not torch.equal(finite, torch.isfinite(second)):
        return math.inf
    return float(torch.linalg.vector_norm(torch.where(finite, first - second, 0)))


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have equal values; NaN equals NaN. Syncs."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype not in _COMPARABLE:  # torch compares no float8 and no complex32
        one = _wide(one)
        other = _wide(other)
    if torch.equal(one, other):
        return True
    are_nan = (one != one) & (other != other)
    return bool(((one == other) | are_nan).all())


_COMPARABLE = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool)
) | frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))


def changed_by_a_skip(number: int, before: Row, row: Row) -> Difference | None:
    """Return a parameter, moment or average that a skipped step has changed; None if there is none."""
    if not row["found_inf"].item():
        return None
    for name, value in row.items():
        is_optimizer_state = name.startswith("opt_state.") and name in before
        must_stay = is_optimizer_state or name.startswith(("params.", "ema."))
        if must_stay and not is_same(before[name], value):
            return Difference(number, f"{name}, which a skipped step changed,", math.inf, 0.0)
    return None
