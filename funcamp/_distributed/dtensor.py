"""DTensors: from what a rank sees in its part of each to what holds for the whole.

A verdict is shared over every dimension of a tensor's mesh. A sum goes over those dimensions where the parts differ,
shards and partial sums, and counts replicas once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Across(NamedTuple):
    """The dimensions of a mesh over which the parts of a tensor differ."""

    mesh: Any
    dims: tuple[int, ...]


def is_distributed(leaf: object) -> bool:
    """Whether it is a DTensor; importing the class takes half a second."""
    return isinstance(leaf, Tensor) and hasattr(leaf, "device_mesh") and hasattr(leaf, "placements")


def settled_sum(leaf: Any) -> Any:
    """A DTensor without partial sums: only the sum tells whether it is finite. Anything else as it is."""
    if not is_distributed(leaf) or not any(placement.is_partial() for placement in leaf.placements):
        return leaf
    from torch.distributed.tensor import Replicate

    whole = [Replicate() if placement.is_partial() else placement for placement in leaf.placements]
    return leaf.redistribute(placements=whole)


def local(leaf: Any) -> Tensor:
    """This rank's part of a DTensor, sharing its storage; anything else as it is."""
    part: Tensor = leaf.to_local() if is_distributed(leaf) else leaf
    return part


def as_part_of(leaf: Any, part: Tensor | None) -> Tensor | None:
    """A local tensor as what `local` would take of one like leaf; as it is where leaf is plain."""
    if part is None or not is_distributed(leaf):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, leaf.device_mesh, leaf.placements, run_check=False, shape=leaf.shape, stride=leaf.stride()
    )


def across(leaf: Any) -> Across | None:
    """Over what the parts of a tensor differ; None for a plain tensor and for replicas."""
    if not is_distributed(leaf):
        return None
    dims = tuple([dim for dim, placement in enumerate(leaf.placements) if not placement.is_replicate()])
    return Across(leaf.device_mesh, dims) if dims else None


def groups(leaves: Sequence[Any]) -> list[tuple[Across | None, list[Any]]]:
    """Tensors by what they differ over, in the order in which that first comes."""
    found: list[tuple[Across | None, list[Any]]] = []
    for leaf in leaves:
        key = across(leaf)
        members = next((members for known, members in found if known == key), None)
        if members is None:
            found.append((key, [leaf]))
        else:
            members.append(leaf)
    return found


def total(value: Tensor, over: Across | None) -> Tensor:
    """The sum over ranks: one all-reduce for each dimension."""
    if over is None:
        return value
    from torch.distributed.tensor import DTensor, Partial, Replicate

    placements = [Partial() if dim in over.dims else Replicate() for dim in range(over.mesh.ndim)]
    summed: Tensor = DTensor.from_local(value, over.mesh, placements, run_check=False).full_tensor()
    return summed


def agreed(flags: Tensor, leaves: Sequence[Any]) -> Tensor:
    """Flags, bool, made true where they are on any rank of the meshes of these tensors.

    Over replicas too: where they have come to differ, the ranks must still skip together.
    """
    meshes: list[Any] = []
    for leaf in leaves:
        if is_distributed(leaf) and not any(leaf.device_mesh == mesh for mesh in meshes):
            meshes.append(leaf.device_mesh)
    for mesh in meshes:
        flags = total(flags.float(), Across(mesh, tuple(range(mesh.ndim)))) != 0
    return flags
