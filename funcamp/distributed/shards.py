"""Flat storage sharded over ranks: each rank stores one slice of every group.

    group  | rank 0 | rank 1 | ... | rank n - 1, zeros at the end |      slice = ceil(size / n) elements

The slices are those of a DTensor with Shard(0), so torch.distributed.checkpoint reads them on any number of ranks.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from funcamp import _tree, _upstream
from funcamp._dtensor import is_distributed, local
from funcamp._storage.params import Params
from funcamp._types import Tree
from funcamp.distributed.collectives import Ranks, process_group, reduce_scatter_each


def summed_slices(params: Params, ranks: Ranks) -> Params:
    """Return this rank's slices of the sum over ranks, by one reduce-scatter per large group and dtype."""
    groups = list(params.groups)
    present = [number for number in params.layout.last_first() if groups[number] is not None]
    padded = [ranks.padded(group) for group in [groups[number] for number in present] if group is not None]
    for number, part in zip(present, reduce_scatter_each(padded, ranks)):
        groups[number] = part
    return Params(tuple(groups), params.layout, ranks)


def pieces_of(params: Params, number: int) -> list[Tensor]:
    """Return the pieces of a group's tensors that are in this rank's slice, then the padding at the end.

    A tensor of other ranks has an empty piece.
    """
    group, ranks = params.groups[number], params.ranks
    assert group is not None
    assert ranks is not None
    begin, sizes = ranks.rank * group.numel(), params.layout.pieces[number]
    ends = [min(max(end - begin, 0), group.numel()) for end in itertools.accumulate(sizes)]
    return [group[start:end] for start, end in zip([0, *ends], [*ends, group.numel()])]


def slice_of(params: Params) -> Tree:
    """Return the groups for a checkpoint: a rank's slices as DTensors without the padding; single tensors by name."""
    ranks = params.ranks
    if ranks is None:
        return list(params.groups) if params.layout.flat else _by_name(params)
    from torch.distributed.device_mesh import DeviceMesh  # half a second to import
    from torch.distributed.tensor import DTensor, Shard

    device = next(group.device.type for group in params.groups if group is not None)
    assert isinstance(ranks, Ranks)
    mesh = DeviceMesh.from_group(process_group(ranks), device)
    if _upstream.KEPT_GROUP.present:
        mesh._pg_registry.clear()  # read only when Dynamo traces the mesh
    found: list[Tensor | None] = []
    for group, sizes in zip(params.groups, params.layout.pieces):
        if group is None or not group.dim():
            found.append(group)
            continue
        size = sum(sizes)
        held = group[: max(0, min(group.numel(), size - ranks.rank * group.numel()))]
        found.append(DTensor.from_local(held, mesh, [Shard(0)], shape=torch.Size([size]), stride=(1,)))
    return found


def _by_name(params: Params) -> dict[str, Tensor | None]:
    """Return tensors that are groups by their names; one with several names by its first."""
    layout = params.layout
    names = _tree.names(layout.tree(range(len(layout.slots))))
    first_names: dict[int, str] = {}
    for name, slot in zip(names, layout.leaves):
        if slot is not None:
            first_names.setdefault(slot, name)
    return {first_names[slot]: group for slot, group in enumerate(params.groups)}


def joined_slice(saved: Tensor, like: Tensor) -> Tensor:
    """Invert `slice_of` for one leaf: return a rank's plain, padded slice on like's device."""
    if is_distributed(like) or not is_distributed(saved):
        return saved.detach().to(like.device, copy=True)
    part = local(saved).detach().to(like.device)
    return torch.cat([part, like.new_zeros(like.numel() - part.numel())])
