"""DTensors: their parts, their full values, and reductions over their parts.

A flag is reduced over every dimension of a tensor's mesh. A sum is reduced over the dimensions in which the parts
differ (shards and partial sums) and counts replicas once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


class Across(NamedTuple):
    """The mesh dimensions over which the parts of a tensor differ."""

    mesh: DeviceMesh
    dims: tuple[int, ...]


def is_distributed(leaf: object) -> TypeGuard[DTensor]:
    """Return whether leaf is a DTensor, without importing the class, which takes half a second."""
    return isinstance(leaf, Tensor) and hasattr(leaf, "device_mesh") and hasattr(leaf, "placements")


def sum_partials(leaf: Tensor) -> Tensor:
    """Sum a DTensor's partial sums, because only the sum shows whether it is finite."""
    if not is_distributed(leaf) or not any(placement.is_partial() for placement in leaf.placements):
        return leaf
    from torch.distributed.tensor import Replicate

    placements_of_sum = [Replicate() if placement.is_partial() else placement for placement in leaf.placements]
    return leaf.redistribute(placements=placements_of_sum)


def local(leaf: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, sharing its storage; any other leaf as it is."""
    part: Tensor = leaf.to_local() if is_distributed(leaf) else leaf
    return part


def as_dtensor_like(leaf: Tensor, part: Tensor) -> Tensor:
    """Return a local part as a DTensor like leaf; as it is if leaf is a plain tensor."""
    if not is_distributed(leaf):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, leaf.device_mesh, leaf.placements, run_check=False, shape=leaf.shape, stride=leaf.stride()
    )


def full(leaf: Tensor) -> Tensor:
    """Return all values of a DTensor as a plain tensor, by one collective per mesh dimension; any other as it is."""
    if not is_distributed(leaf):
        return leaf
    if leaf.is_complex():  # NCCL knows no complex numbers
        return torch.view_as_complex(full(torch.view_as_real(leaf)))
    values: Tensor = leaf.full_tensor()
    return values


def empty_full(leaf: Tensor) -> Tensor:
    """Return a plain tensor like `full`, without the values and without a collective."""
    return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)


def group_by_mesh_dims(leaves: Sequence[Tensor]) -> list[tuple[Across | None, list[Tensor]]]:
    """Group tensors by the mesh dimensions over which their parts differ (None for plain tensors and replicas)."""
    grouped: dict[Across | None, list[Tensor]] = {}
    for leaf in leaves:
        grouped.setdefault(_across(leaf), []).append(leaf)
    return list(grouped.items())


def _across(leaf: Tensor) -> Across | None:
    """Return the mesh dimensions over which the parts of a tensor differ; None if there are none."""
    if not is_distributed(leaf):
        return None
    dims = tuple([dim for dim, placement in enumerate(leaf.placements) if not placement.is_replicate()])
    return Across(leaf.device_mesh, dims) if dims else None


def total(value: Tensor, across: Across | None) -> Tensor:
    """Return the sum over ranks, by one all-reduce per dimension."""
    if across is None:
        return value
    from torch.distributed.tensor import DTensor, Partial, Replicate

    placements: list[Placement] = [Replicate()] * across.mesh.ndim
    for dim in across.dims:
        placements[dim] = Partial()
    summed = DTensor.from_local(value, across.mesh, placements, run_check=False)
    for dim in across.dims:  # several at once would be as many collectives, and torch warns
        placements[dim] = Replicate()
        summed = summed.redistribute(placements=placements)
    return full(summed)


def any_in_meshes(flags: Tensor, leaves: Sequence[Tensor | None]) -> Tensor:
    """Return bool flags that are true if they are true on any rank of these tensors' meshes.

    Replicas are included: if they have diverged, the ranks must still skip together.
    """
    meshes: list[DeviceMesh] = []
    for leaf in leaves:
        if is_distributed(leaf) and not any(leaf.device_mesh == mesh for mesh in meshes):
            meshes.append(leaf.device_mesh)
    for mesh in meshes:
        all_dims = tuple(range(mesh.ndim))
        flags = total(flags.float(), Across(mesh, all_dims)) != 0
    return flags
