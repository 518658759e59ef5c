"""Collectives as pure functions: part of the graph under torch.compile, blocking in eager mode."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from funcamp import _upstream
from funcamp._types import Reduce

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement
    from typing_extensions import TypeIs

#: The processes that communicate: a group, or a mesh of them.
Group: TypeAlias = "dist.ProcessGroup | DeviceMesh"

#: Size in bytes below which a collective's latency dominates, so that copying into one buffer saves time.
_SMALL = 2**20


class Ranks(NamedTuple):
    """The constants of a process group in a compiled program."""

    name: str
    size: int
    rank: int
    """This process's rank in the group."""


#: The ranks along every dimension of a mesh, the outermost first; one for a group.
Dims: TypeAlias = "Sequence[Ranks]"


def ranks_of(call: str, group: object = None) -> list[Ranks]:
    """Return the constants of a ProcessGroup, of every dimension of a DeviceMesh, or of the default group.

    Raises:
        TypeError: group is something else.
        ValueError: group is without this process.
        RuntimeError: torch.distributed is not initialized.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            f"{call}: needs torch.distributed: start the script by torchrun, and call "
            "torch.distributed.init_process_group() before"
        )
    if group is None:
        group = dist.group.WORLD
    groups = group.get_all_groups() if is_mesh(group) else [group]
    constants: list[Ranks] = []
    for process_group in groups:
        if process_group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"{call}: group must contain this process; got one without it")
        if not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(f"{call}: group must be a ProcessGroup, a DeviceMesh or None; got {process_group!r}")
        constants.append(Ranks(str(process_group.group_name), process_group.size(), process_group.rank()))
    return constants


def process_group(ranks: Ranks) -> dist.ProcessGroup:
    """Return the ProcessGroup of these constants."""
    resolve = _upstream.find("torch.distributed.distributed_c10d._resolve_process_group")
    group: dist.ProcessGroup = resolve(ranks.name)
    return group


def mesh_of(ranks: Ranks, device_type: str) -> DeviceMesh:
    """Return a mesh of one dimension of these ranks."""
    from torch.distributed.device_mesh import DeviceMesh  # half a second to import

    return DeviceMesh.from_group(process_group(ranks), device_type)


def check_alike(rule: str, described: list[str], dims: Dims) -> None:
    """Raise ValueError on all ranks if a rank's description differs from the first rank's; reads the host.

    Args:
        rule: what must be the same, for the error.
        described: this rank's description, line by line.
        dims: the ranks.
    """
    descriptions = [described]
    for ranks in reversed(dims):
        gathered: list[Any] = [None] * ranks.size
        dist.all_gather_object(gathered, descriptions, process_group(ranks))
        descriptions = [description for descriptions_of_one in gathered for description in descriptions_of_one]
    first_description = descriptions[0]
    for rank, description in enumerate(descriptions):
        if description == first_description:
            continue
        for first, other in itertools.zip_longest(first_description, description, fillvalue="nothing more"):
            if first != other:
                raise ValueError(f"init: {rule}; on rank 0 {first}, on rank {rank} {other}")


def max_over(*groups: Group) -> Reduce:
    """Return a function that reduces the flag by MAX over ranks that have parts of one model's gradients.

    found_inf = max over ranks of found_inf: one all-reduce of 4 bytes per group, whatever the number of gradients. With
    the tensor, pipeline and data parallel groups of a process, reduced in turn, it is the MAX over all their ranks.
    Pure; torch.compile puts it into the graph; no host sync.

    Args:
        *groups: ProcessGroups or DeviceMeshes (all their dimensions count); by default the group of all processes.
            Pass the groups in the same order on every rank.

    Returns:
        A function of the flag, for `reduce` of `unscale_and_check`.

    Raises:
        TypeError: a group is neither a ProcessGroup nor a DeviceMesh.
        ValueError: a group does not contain this process.
        RuntimeError: torch.distributed is not initialized.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> _, state = unscale_and_check(init(), torch.ones(2), reduce=distributed.max_over())
        >>> state.found_inf
        tensor(0.)
        >>> dist.destroy_process_group()

    References:
        Megatron-LM and apex take the MAX over their model-parallel group (apex/transformer/amp/grad_scaler.py).
    """
    constants: list[Ranks] = []
    for group in groups or [None]:
        constants += ranks_of("max_over", group)
    # A group that occurs twice, in two meshes for example, is reduced over once.
    return functools.partial(all_reduce, op="max", dims=tuple(dict.fromkeys(constants)))


def all_reduce(x: Tensor, op: str, dims: Dims) -> Tensor:
    """Return the sum or the max of a real tensor over ranks."""
    for ranks in dims:
        if ranks.size > 1:
            x = _waited(_ops().all_reduce(x.contiguous(), op, ranks.name))
    return x


def all_reduce_each(tensors: Sequence[Tensor], dims: Dims) -> list[Tensor]:
    """Return the sums over ranks of real or complex tensors.

    There is one all-reduce per large tensor, and one per dtype for the small ones. Not Inductor's coalesced
    collectives: with gloo they abort the process (2.13); for NCCL merging small ones is enough.
    """
    results = list(tensors)
    if size_of(dims) == 1:
        return results
    real_tensors = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    for indices in _sent_together(real_tensors):
        sums = _summed_together([real_tensors[index] for index in indices], dims)
        for index, sum_of_one in zip(indices, sums):
            results[index] = torch.view_as_complex(sum_of_one) if tensors[index].is_complex() else sum_of_one
    return results


def _summed_together(tensors: list[Tensor], dims: Dims) -> list[Tensor]:
    """Return the sums over ranks of real tensors of one dtype, by one all-reduce."""
    if len(tensors) == 1:
        # Without views around it, because the compiler would wait for them before the backward pass continues.
        return [all_reduce(tensors[0], "sum", dims)]
    buffer = torch.cat([tensor.reshape(-1) for tensor in tensors])
    sums = torch.split(all_reduce(buffer, "sum", dims), [tensor.numel() for tensor in tensors])
    return [sum_of_one.view(tensor.shape) for tensor, sum_of_one in zip(tensors, sums)]


def _sent_together(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the tensors of each collective."""
    large: list[list[int]] = []
    small_by_dtype: dict[torch.dtype, list[int]] = {tensor.dtype: [] for tensor in tensors}
    for index, tensor in enumerate(tensors):
        if tensor.numel() * tensor.element_size() < _SMALL:
            small_by_dtype[tensor.dtype].append(index)
        else:
            large.append([index])
    # The small ones last, because compilers keep the collectives' order.
    return large + [indices for indices in small_by_dtype.values() if indices]


def sum_placed_like(leaf: DTensor, values: Tensor) -> Tensor:
    """Return the sum over ranks of values that each rank has in full, placed like leaf: a reduce-scatter if sharded."""
    from torch.distributed.tensor import DTensor, Partial

    if values.is_complex():  # NCCL knows no complex numbers
        return torch.view_as_complex(sum_placed_like(leaf, torch.view_as_real(values)))
    mesh = leaf.device_mesh
    placements: list[Placement] = [Partial()] * mesh.ndim
    part = DTensor.from_local(values, mesh, placements, run_check=False)
    for dim in reversed(range(mesh.ndim)):  # shards first: what is summed over replicas then is smaller
        placements[dim] = leaf.placements[dim]
        part = part.redistribute(placements=placements)
    return part


def broadcast(x: Tensor, dims: Dims) -> Tensor:
    """Return the first rank's tensor, of any dtype."""
    as_bytes = x.contiguous().reshape(-1).view(torch.uint8)  # gloo does not support every dtype
    for ranks in dims:
        as_bytes = _waited(_ops().broadcast(as_bytes, 0, ranks.name))
    return as_bytes.view(x.dtype).view(x.shape)


def size_of(dims: Dims) -> int:
    """Return the number of all ranks."""
    return math.prod([ranks.size for ranks in dims])


def _ops() -> Any:
    """Return torch's functional collectives: operations that return a tensor to wait for."""
    return torch.ops._c10d_functional


def _waited(x: Tensor) -> Tensor:
    """Return what a collective returned, when it has arrived."""
    waited: Tensor = _ops().wait_tensor(x)
    return waited


def is_mesh(group: object) -> TypeIs[DeviceMesh]:
    """Return whether this is a DeviceMesh, without importing the class."""
    return hasattr(group, "get_all_groups") and hasattr(group, "ndim")
