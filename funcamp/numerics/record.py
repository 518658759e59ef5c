"""Counts of taps: a record of both passes, and records by name in one tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from funcamp import _tree
from funcamp.numerics.counting import WIDTH
from funcamp.numerics.statistics import Stats, check_positive


class Record:
    """The statistics of a tensor (forward pass) and of its gradient (backward pass); `a + b` merges.

    Immutable, a pytree of two tensors. `str()` shows the standard deviations of the finite values and the number of
    non-finite ones, `(-> 0.573, <- 0.0021 (3 inf of 24))`; this reads the record on the host.

    Example:
        >>> from funcamp.numerics import probe, tap
        >>> print(torch.func.grad(lambda probe, x: (tap(x, probe) * 2 * x).sum())(probe(), torch.tensor([1.0, 3.0])))
        (-> 1.41, <- 2.83)
    """

    forward: Stats
    backward: Stats

    def __init__(self, forward: Stats, backward: Stats) -> None:
        self.forward = forward
        self.backward = backward

    def __add__(self, other: Record) -> Record:
        return Record(self.forward + other.forward, self.backward + other.backward)

    def __repr__(self) -> str:
        return f"Record({self.forward!r}, {self.backward!r})"

    def __str__(self) -> str:
        return f"(-> {_text(self.forward)}, <- {_text(self.backward)})"

    def total(self) -> Record:
        """Merge a batch of records, for example of vmap, into one."""
        return Record(self.forward.total(), self.backward.total())

    def unscale(self, scale: float | Tensor) -> Record:
        """Return the record with the backward pass as without loss scaling; exact if scale is a power of two.

        See `Stats.rescale`.
        """
        check_positive("unscale", "scale", scale)
        return Record(self.forward, self.backward.rescale(1 / scale))


_tree.register(
    Record,
    lambda record: ([record.forward, record.backward], None),
    lambda passes, _: Record(passes[0], passes[1]),
    "passes",
)


def _text(stats: Stats) -> str:
    """Return the standard deviation of a tensor and its non-finite values."""
    if stats.row.dim() > 1:
        stats = stats.total()
    std = stats.std.item()
    std_text = "n/a" if math.isnan(std) else f"{std:.3g}"
    nonfinite = (("NaN", stats.nan), ("inf", stats.posinf + stats.neginf))
    numbers = [f"{number.item():.0f} {kind}" for kind, number in nonfinite if number > 0]
    if not numbers:
        return std_text
    return f"{std_text} ({', '.join(numbers)} of {stats.count.item():.0f})"


def probe(device: torch.device | str | None = None) -> Record:
    """Return the empty record that `tap` takes, to differentiate with respect to. No sync.

    Args:
        device: the device of the tapped tensors.

    Raises:
        RuntimeError: torch does not know the device.

    Example:
        >>> probe().forward.count
        tensor(0., dtype=torch.float64)
    """
    forward = torch.zeros(WIDTH, dtype=torch.float64, device=device)
    backward = torch.zeros(WIDTH, dtype=torch.float64, device=device)
    return Record(Stats(forward), Stats(backward))


class Taps:
    """The taps of a loss by name, for a step: a tape of empty records, whose counts add up."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def tape(self, device: torch.device) -> dict[str, Record]:
        """Return empty records by name."""
        return {name: probe(device) for name in self.names}

    def collected(self, records: Mapping[str, Record]) -> Records:
        """Return the records in one tensor."""
        return Records.of(records)


class Records(Mapping[str, Record]):
    """Records by name in one tensor, which a compiled step returns faster than many; `a + b` merges.

    Immutable, a pytree of one tensor. As a mapping it creates each `Record` on access.

    Example:
        >>> records = Records.of({"layer": probe()})
        >>> list(records), records["layer"].forward.count, records.rows.shape
        (['layer'], tensor(0., dtype=torch.float64), torch.Size([1, 2, 568]))
    """

    rows: Tensor
    """float64, shape (..., names, 2, 568), 2 for the passes; leading dimensions are a batch of records."""

    def __init__(self, names: tuple[str, ...], rows: Tensor) -> None:
        self.names = names
        self.rows = rows

    @classmethod
    def of(cls, records: Mapping[str, Record]) -> Records:
        """Return the records in one tensor; raise ValueError if there is none."""
        if not records:
            raise ValueError("Records.of: records must hold one at least; got none")
        rows = [torch.stack([record.forward.row, record.backward.row], -2) for record in records.values()]
        return cls(tuple(records), torch.stack(rows, -3))

    def __getitem__(self, name: str) -> Record:
        if name not in self.names:
            raise KeyError(name)
        passes = self.rows.select(-3, self.names.index(name))
        forward, backward = passes.unbind(-2)
        return Record(Stats(forward), Stats(backward))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    # Those of Mapping compare the records, each of which is a new object at every access, and make this unhashable.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __add__(self, other: Records) -> Records:
        if not isinstance(other, Records):
            return NotImplemented
        if other.names != self.names:
            raise ValueError(f"Records: names must be the same to be merged; got {self.names} and {other.names}")
        return Records(self.names, self.rows + other.rows)

    def __repr__(self) -> str:
        return f"Records({self.names}, {_tree.describe(self.rows)})"

    def total(self) -> Records:
        """Merge a batch of records, for example of unrolled steps, into one."""
        return Records(self.names, self.rows.reshape(-1, *self.rows.shape[-3:]).sum(0))


_tree.register(
    Records,
    lambda records: ([records.rows], records.names),
    lambda rows, names: Records(tuple(names), rows[0]),
    "rows",
)
