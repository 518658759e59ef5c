"""Flat storage sharded over ranks: each rank stores one slice of every group.

    group  | rank 0 | rank 1 | ... | rank n - 1, zeros at the end |      slice = ceil(size / n) elements

The slices are those of a DTensor with Shard(0), so torch.distributed.checkpoint reads them on any number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._dtensor import is_distributed, local
from funcamp._storage.params import Params
from funcamp._types import Tree
from funcamp.distributed.collectives import Ranks, process_group, reduce_scatter_each


def summed_slices(params: Params, ranks: Ranks) -> Params:
    """Return this rank's slices of the sum over ranks, by one reduce-scatter per large group and dtype."""
    # In the order in which gradients complete, so that a collective can overlap the rest of the backward pass.
    padded_groups: dict[int, Tensor] = {}
    for number in params.layout.last_first():
        group = params.groups[number]
        if group is not None:
            padded_groups[number] = ranks.padded(group)
    groups = list(params.groups)
    slices = reduce_scatter_each(list(padded_groups.values()), ranks)
    for number, slice_of_sum in zip(padded_groups, slices):
        groups[number] = slice_of_sum
    return Params(tuple(groups), params.layout, ranks)


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
    # DTensor's caches keep every mesh, a mesh its group, and a group the threads that may abort the process when it
    # ends (Python 3.13 and older; pytorch#179291). Only Dynamo reads this, when it traces the mesh.
    mesh._pg_registry.clear()
    groups: list[Tensor | None] = []
    for own_slice, padded_sizes in zip(params.groups, params.layout.padded_sizes):
        if own_slice is None or not own_slice.dim():  # a number per group is the same on every rank
            groups.append(own_slice)
            continue
        group_size = sum(padded_sizes)
        slice_start = ranks.rank * own_slice.numel()
        # The last ranks may have less of the group than a slice, or nothing: the rest is zeros.
        size_without_padding = max(0, min(own_slice.numel(), group_size - slice_start))
        part = own_slice[:size_without_padding]
        groups.append(DTensor.from_local(part, mesh, [Shard(0)], shape=torch.Size([group_size]), stride=(1,)))
    return groups


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
