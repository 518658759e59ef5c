"""Collectives as pure functions: part of the graph under torch.compile, blocking in eager mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from funcamp import _upstream
from funcamp._types import Reduce

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
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

    def gather(self, slices: Sequence[Tensor]) -> list[Tensor]:
        """Return the slices of all ranks, one after the other, by as few all-gathers as possible."""
        return all_gather_each(slices, self)

    def cut(self, group: Tensor) -> Tensor:
        """Return this rank's slice of a group that every rank has in full, as a copy."""
        return self.padded(group).tensor_split(self.size)[self.rank].clone()

    def padded(self, group: Tensor) -> Tensor:
        """Return a group with zeros at the end, so that every rank has a slice of one size."""
        padding = -group.numel() % self.size
        return torch.cat([group, group.new_zeros(padding)]) if padding else group


def ranks_of(call: str, group: object = None) -> Ranks:
    """Return the constants of a ProcessGroup, of a DeviceMesh of one dimension, or of the default group.

    Raises:
        TypeError: group is something else.
        ValueError: group is a mesh of several dimensions, or one without this process.
        RuntimeError: torch.distributed is not initialized.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            f"{call}: needs torch.distributed: start the script by torchrun, and call "
            "torch.distributed.init_process_group() before"
        )
    if _is_mesh(group):
        if group.ndim != 1:
            raise ValueError(f"{call}: group must be a mesh of one dimension, as mesh['dp'] is; got {group!r}")
        group = group.get_group()
    if group is None:
        group = dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{call}: group must contain this process; got one without it")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{call}: group must be a ProcessGroup, a DeviceMesh or None; got {group!r}")
    return Ranks(str(group.group_name), group.size(), group.rank())


def process_group(ranks: Ranks) -> dist.ProcessGroup:
    """Return the ProcessGroup of these constants."""
    resolve = _upstream.find("torch.distributed.distributed_c10d._resolve_process_group")
    group: dist.ProcessGroup = resolve(ranks.name)
    return group


def check_alike(rule: str, described: list[str], ranks: Ranks) -> None:
    """Raise ValueError on all ranks if a rank's description differs from the first rank's; reads the host.

    Args:
        rule: what must be the same, for the error.
        described: this rank's description, line by line.
        ranks: the ranks.
    """
    if ranks.size == 1:
        return
    descriptions: list[Any] = [None] * ranks.size
    dist.all_gather_object(descriptions, described, process_group(ranks))
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
        A function of the flag, for `reduce` of `unscale_and_check` or for `parallel` of `make_train_step`.

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
    process_groups: list[Group | None] = []
    for group in groups:
        if _is_mesh(group):
            process_groups += group.get_all_groups()
        else:
            process_groups.append(group)
    if not process_groups:
        process_groups.append(None)  # the default group
    # A group that occurs twice, in two meshes for example, is reduced over once.
    distinct_ranks = dict.fromkeys([ranks_of("max_over", group) for group in process_groups])
    return _MaxOver(tuple(distinct_ranks))


class _MaxOver:
    """What `max_over` returns: a class, so that it has a `repr`."""

    def __init__(self, groups: tuple[Ranks, ...]) -> None:
        self._groups = groups

    def __repr__(self) -> str:
        return f"max_over({', '.join(group.name for group in self._groups)})"

    def __call__(self, flag: Tensor) -> Tensor:
        for ranks in self._groups:
            flag = all_reduce(flag, "max", ranks)
        return flag


def all_reduce(x: Tensor, op: str, ranks: Ranks) -> Tensor:
    """Return the sum or the max of a real tensor over ranks."""
    if ranks.size == 1:
        return x
    return _waited(_ops().all_reduce(x.contiguous(), op, ranks.name))


def all_reduce_each(tensors: Sequence[Tensor], ranks: Ranks) -> list[Tensor]:
    """Return the sums over ranks, by one all-reduce per large tensor and one per dtype for the small ones."""

    def reduced(together: list[Tensor]) -> list[Tensor]:
        if len(together) == 1:
            # Without views around it, because the compiler would wait for them before the backward pass continues.
            return [all_reduce(together[0], "sum", ranks)]
        buffer = torch.cat([tensor.reshape(-1) for tensor in together])
        sums = torch.split(all_reduce(buffer, "sum", ranks), [tensor.numel() for tensor in together])
        return [sum_of_one.view(tensor.shape) for tensor, sum_of_one in zip(together, sums)]

    return _with_small_ones_merged(reduced, tensors, ranks)


def all_gather_each(tensors: Sequence[Tensor], ranks: Ranks) -> list[Tensor]:
    """Return the tensors of all ranks along their first dimensions, by as few all-gathers as possible."""

    def gathered_buffer(buffer: Tensor) -> Tensor:
        return _waited(_ops().all_gather_into_tensor(buffer, ranks.size, ranks.name))

    def gathered(together: list[Tensor]) -> list[Tensor]:
        if len(together) == 1:
            return [gathered_buffer(together[0].contiguous())]
        buffer = torch.cat([tensor.reshape(-1) for tensor in together])
        # A row per rank; the elements of one tensor are some of its columns.
        rows = gathered_buffer(buffer).view(ranks.size, -1)
        columns = torch.split(rows, [tensor.numel() for tensor in together], dim=1)
        return [values.reshape(-1, *tensor.shape[1:]) for tensor, values in zip(together, columns)]

    return _with_small_ones_merged(gathered, tensors, ranks)


def reduce_scatter_each(tensors: Sequence[Tensor], ranks: Ranks) -> list[Tensor]:
    """Return this rank's parts (first dimension) of the sums over ranks, by as few reduce-scatters as possible."""

    def scattered_buffer(buffer: Tensor) -> Tensor:
        return _waited(_ops().reduce_scatter_tensor(buffer, "sum", ranks.size, ranks.name))

    def scattered(together: list[Tensor]) -> list[Tensor]:
        if len(together) == 1:
            return [scattered_buffer(together[0].contiguous())]
        # A row per rank: its parts of all tensors, one after the other.
        rows_by_tensor = [tensor.reshape(ranks.size, -1) for tensor in together]
        buffer = torch.cat(rows_by_tensor, 1).reshape(-1)
        parts = torch.split(scattered_buffer(buffer), [rows.shape[1] for rows in rows_by_tensor])
        return [part.view(-1, *tensor.shape[1:]) for tensor, part in zip(together, parts)]

    return _with_small_ones_merged(scattered, tensors, ranks)


def _with_small_ones_merged(
    collective: Callable[[list[Tensor]], list[Tensor]], tensors: Sequence[Tensor], ranks: Ranks
) -> list[Tensor]:
    """Return the results of a collective for every tensor, by one call per large tensor and per dtype of small ones.

    Args:
        collective: a function of real tensors of one dtype, which it sends together.
        tensors: real or complex tensors.
        ranks: the ranks; a single one has the results already.
    """
    # Not Inductor's coalesced collectives: with gloo they abort the process (2.13); for NCCL merging small ones is
    # enough.
    results = list(tensors)
    if ranks.size == 1:
        return results
    real_tensors = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    for indices in _sent_together(real_tensors):
        outputs = collective([real_tensors[index] for index in indices])
        for index, output in zip(indices, outputs):
            results[index] = torch.view_as_complex(output) if tensors[index].is_complex() else output
    return results


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


def broadcast(x: Tensor, ranks: Ranks) -> Tensor:
    """Return the first rank's tensor, of any dtype."""
    if ranks.size == 1:
        return x
    as_bytes = x.contiguous().reshape(-1).view(torch.uint8)  # gloo does not support every dtype
    return _waited(_ops().broadcast(as_bytes, 0, ranks.name)).view(x.dtype).view(x.shape)


def _ops() -> Any:
    """Return torch's functional collectives: operations that return a tensor to wait for."""
    return torch.ops._c10d_functional


def _waited(x: Tensor) -> Tensor:
    """Return what a collective returned, when it has arrived."""
    waited: Tensor = _ops().wait_tensor(x)
    return waited


def _is_mesh(group: object) -> TypeIs[DeviceMesh]:
    """Return whether this is a DeviceMesh, without importing the class."""
    return hasattr(group, "get_all_groups") and hasattr(group, "ndim")
