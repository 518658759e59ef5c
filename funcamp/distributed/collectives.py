"""Collectives as pure functions: part of the graph under torch.compile, blocking in eager mode."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from funcamp import _upstream
from funcamp._types import Reduce

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
        """Return this rank's slice of a group that every rank has in full, in memory of its own."""
        return self.padded(group).tensor_split(self.size)[self.rank].clone()

    def padded(self, group: Tensor) -> Tensor:
        """Return a group with zeros at the end, so that every rank has a slice of one size."""
        missing = -group.numel() % self.size
        return torch.cat([group, group.new_zeros(missing)]) if missing else group


def ranks_of(call: str, group: Any = None) -> Ranks:
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
    found: dist.ProcessGroup = _upstream.find("torch.distributed.distributed_c10d._resolve_process_group")(ranks.name)
    return found


def check_alike(rule: str, described: list[str], ranks: Ranks) -> None:
    """Raise ValueError on all ranks if a rank's description differs from the first rank's; reads the host."""
    if ranks.size == 1:
        return
    found: list[Any] = [None] * ranks.size
    dist.all_gather_object(found, described, process_group(ranks))
    for rank, other in enumerate(found):
        if other != found[0]:
            pairs = itertools.zip_longest(found[0], other, fillvalue="nothing more")
            first, here = next((a, b) for a, b in pairs if a != b)
            raise ValueError(f"init: {rule}; on rank 0 {first}, on rank {rank} {here}")


def max_over(*groups: Any) -> Reduce:
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
    each = [part for group in groups for part in (group.get_all_groups() if _is_mesh(group) else [group])]
    return _MaxOver(tuple(dict.fromkeys(ranks_of("max_over", group) for group in each or [None])))


class _MaxOver:
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
    return x if ranks.size == 1 else _waited(_ops().all_reduce(x.contiguous(), op, ranks.name))


def largest(amax: Tensor, ranks: Ranks) -> Tensor:
    """Return the largest amaxes of all ranks; infinite for NaN."""
    return all_reduce(comparable(amax), "max", ranks)


def comparable(amax: Tensor) -> Tensor:
    """Return amaxes, infinite for NaN, with which the maxima of backends differ."""
    return torch.where(torch.isfinite(amax), amax, math.inf)


def all_reduce_each(tensors: Sequence[Tensor], ranks: Ranks) -> list[Tensor]:
    """Return the sums over ranks, by one all-reduce per large tensor and one per dtype for the small ones."""

    def reduced(group: list[Tensor]) -> list[Tensor]:
        if len(group) == 1:  # without views around it, or the compiler waits for it before the backward pass goes on
            return [all_reduce(group[0], "sum", ranks)]
        total = all_reduce(torch.cat([x.reshape(-1) for x in group]), "sum", ranks)
        return [part.view(x.shape) for x, part in zip(group, torch.split(total, [x.numel() for x in group]))]

    return _in_groups(reduced, tensors, ranks)


def all_gather_each(tensors: Sequence[Tensor], ranks: Ranks) -> list[Tensor]:
    """Return the tensors of all ranks along their first dimensions, by as few all-gathers."""

    def gathered(group: list[Tensor]) -> list[Tensor]:
        sent = group[0].contiguous() if len(group) == 1 else torch.cat([x.reshape(-1) for x in group])
        found = _waited(_ops().all_gather_into_tensor(sent, ranks.size, ranks.name))
        if len(group) == 1:
            return [found]
        parts = torch.split(found.view(ranks.size, -1), [x.numel() for x in group], 1)
        return [part.reshape(-1, *x.shape[1:]) for x, part in zip(group, parts)]

    return _in_groups(gathered, tensors, ranks)


def reduce_scatter_each(tensors: Sequence[Tensor], ranks: Ranks) -> list[Tensor]:
    """Return this rank's parts (first dimension) of the sums over ranks, by as few reduce-scatters."""

    def scattered(group: list[Tensor]) -> list[Tensor]:
        rows = [x.reshape(ranks.size, -1) for x in group]
        sent = group[0].contiguous() if len(group) == 1 else torch.cat(rows, 1).reshape(-1)
        found = _waited(_ops().reduce_scatter_tensor(sent, "sum", ranks.size, ranks.name))
        if len(group) == 1:
            return [found]
        parts = torch.split(found, [row.shape[1] for row in rows])
        return [part.view(-1, *x.shape[1:]) for x, part in zip(group, parts)]

    return _in_groups(scattered, tensors, ranks)


def _in_groups(fn: Callable[[list[Tensor]], list[Tensor]], tensors: Sequence[Tensor], ranks: Ranks) -> list[Tensor]:
    # Not Inductor's coalesced collectives: with gloo they abort the process (2.13); for NCCL merging small ones is
    # enough.
    done = list(tensors)
    if ranks.size == 1:
        return done
    real = [torch.view_as_real(value) if value.is_complex() else value for value in tensors]
    small = [value.numel() * value.element_size() < _SMALL for value in real]
    groups = [[place] for place in range(len(real)) if not small[place]]
    for dtype in dict.fromkeys([value.dtype for value in real]):  # last, because compilers keep the collectives' order
        groups.append([place for place, value in enumerate(real) if small[place] and value.dtype == dtype])
    for places in [places for places in groups if places]:
        for place, value in zip(places, fn([real[place] for place in places])):
            done[place] = torch.view_as_complex(value) if tensors[place].is_complex() else value
    return done


def broadcast(x: Tensor, ranks: Ranks) -> Tensor:
    """Return the first rank's tensor, of any dtype."""
    if ranks.size == 1:
        return x
    data = x.contiguous().reshape(-1).view(torch.uint8)  # gloo does not support every dtype
    return _waited(_ops().broadcast(data, 0, ranks.name)).view(x.dtype).view(x.shape)


def _ops() -> Any:
    return torch.ops._c10d_functional


def _waited(x: Tensor) -> Tensor:
    waited: Tensor = _ops().wait_tensor(x)
    return waited


def _is_mesh(group: Any) -> bool:
    return hasattr(group, "get_all_groups") and hasattr(group, "ndim")
