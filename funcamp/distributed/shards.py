"""Flat storage sharded over ranks: each rank stores one slice of every group.

    group  | rank 0 | rank 1 | ... | rank n - 1, zeros at the end |      slice = ceil(size / n) elements

The slices are those of a DTensor with Shard(0), so torch.distributed.checkpoint reads them on any number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from funcamp import _tree, _upstream
from funcamp._dtensor import is_distributed, local
from funcamp._storage.flat import FlatParams
from funcamp._storage.layout import Groups, Layout
from funcamp.distributed.collectives import Ranks, all_gather_each, process_group, reduce_scatter_each


class Shards(FlatParams):
    """The slices of a `FlatParams` on one rank: a pytree that elementwise functions work on."""

    whole = False
    ranks: Ranks

    def __init__(self, groups: Groups, layout: Layout, ranks: Ranks) -> None:
        super().__init__(groups, layout)
        self.ranks = ranks

    def __repr__(self) -> str:
        return f"rank {self.ranks.rank} of {self.ranks.size} of {super().__repr__()}"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise, because a rank has only slices."""
        raise TypeError(
            "FlatParams: params must not be sharded over ranks: a rank has a slice of every group, so only an "
            "elementwise optimizer takes them (not Muon, not Adafactor), and distributed.gather_state makes them "
            f"complete; got {self!r}"
        )

    tree = ravel = state_dict = _refuse

    def gathered(self, dtypes: Mapping[int, torch.dtype | None] | None = None) -> FlatParams:
        """Gather the full groups, in these dtypes if given; None for groups that are not requested.

        One all-gather per large group, and one per dtype for small ones.
        """
        groups: list[Tensor | None] = [None] * len(self.groups)
        sent: dict[int, Tensor] = {}
        for number, group in enumerate(self.groups):
            if group is not None and not group.dim():
                groups[number] = group
            elif group is not None and (dtypes is None or number in dtypes):
                dtype = None if dtypes is None else dtypes[number]
                sent[number] = group if dtype is None else group.to(dtype)
        for number, value in zip(sent, all_gather_each(list(sent.values()), self.ranks)):
            groups[number] = value[: sum(self.layout.pieces[number])]
        return FlatParams(tuple(groups), self.layout)

    def outline(self) -> FlatParams:
        """Return groups of full size that store one zero each."""
        groups = [
            group if group is None or not group.dim() else group.new_zeros(()).expand(sum(sizes))
            for group, sizes in zip(self.groups, self.layout.pieces)
        ]
        return FlatParams(tuple(groups), self.layout)

    def cut_like(self, full: FlatParams) -> Shards:
        """Return this rank's slices of full groups."""
        return cut(full, self.ranks)


_tree.register(
    Shards,
    lambda shards: (list(shards.groups), (shards.layout, shards.ranks)),
    lambda groups, context: Shards(tuple(groups), *context),
    "groups",
)


def cut(flat: FlatParams, ranks: Ranks) -> Shards:
    """Return this rank's slices of storage that every rank has in full; no collective."""

    def part(group: Tensor | None) -> Tensor | None:
        if group is None or not group.dim():  # a number per group (a step count) is the same on every rank
            return group
        return _padded(group, ranks).tensor_split(ranks.size)[ranks.rank].clone()

    return Shards(tuple([part(group) for group in flat.groups]), flat.layout, ranks)


def summed_slices(flat: FlatParams, ranks: Ranks) -> Shards:
    """Return this rank's slices of the sum over ranks, by one reduce-scatter per large group and dtype."""
    groups = list(flat.groups)
    present = [number for number in flat.layout.last_first() if groups[number] is not None]
    padded = [_padded(group, ranks) for group in [groups[number] for number in present] if group is not None]
    for number, part in zip(present, reduce_scatter_each(padded, ranks)):
        groups[number] = part
    return Shards(tuple(groups), flat.layout, ranks)


def pieces_of(shards: Shards, number: int) -> list[Tensor]:
    """Return the pieces of a group's tensors that are in this rank's slice, then the padding at the end.

    A tensor of other ranks has an empty piece.
    """
    group = shards.groups[number]
    assert group is not None
    begin, sizes = shards.ranks.rank * group.numel(), shards.layout.pieces[number]
    ends = [min(max(end - begin, 0), group.numel()) for end in itertools.accumulate(sizes)]
    return [group[start:end] for start, end in zip([0, *ends], [*ends, group.numel()])]


def slice_of(flat: FlatParams) -> list[Tensor | None]:
    """Return the groups of flat storage for a checkpoint: a rank's slices as DTensors without the padding."""
    if not isinstance(flat, Shards):
        return list(flat.groups)
    from torch.distributed.device_mesh import DeviceMesh  # half a second to import
    from torch.distributed.tensor import DTensor, Shard

    device = next(group.device.type for group in flat.groups if group is not None)
    mesh = DeviceMesh.from_group(process_group(flat.ranks), device)
    if _upstream.KEPT_GROUP.present:
        mesh._pg_registry.clear()  # read only when Dynamo traces the mesh
    found: list[Tensor | None] = []
    for group, sizes in zip(flat.groups, flat.layout.pieces):
        if group is None or not group.dim():
            found.append(group)
            continue
        size = sum(sizes)
        held = group[: max(0, min(group.numel(), size - flat.ranks.rank * group.numel()))]
        found.append(DTensor.from_local(held, mesh, [Shard(0)], shape=torch.Size([size]), stride=(1,)))
    return found


def joined_slice(saved: Tensor, like: Tensor) -> Tensor:
    """Invert `slice_of` for one leaf: return a rank's plain, padded slice on like's device."""
    if is_distributed(like) or not is_distributed(saved):
        return saved.detach().to(like.device, copy=True)
    part = local(saved).detach().to(like.device)
    return torch.cat([part, like.new_zeros(like.numel() - part.numel())])


def _padded(group: Tensor, ranks: Ranks) -> Tensor:
    missing = -group.numel() % ranks.size
    return torch.cat([group, group.new_zeros(missing)]) if missing else group
