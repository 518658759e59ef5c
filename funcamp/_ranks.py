"""Collectives as pure functions: torch.compile puts them into a step's graph; eager code waits for each at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from funcamp._types import Reduce


class Ranks(NamedTuple):
    """A process group as constants of a program."""

    name: str
    size: int
    rank: int
    """This process's place in it."""


def ranks_of(call: str, group: Any = None) -> Ranks:
    """The constants of a ProcessGroup, of a DeviceMesh of one dimension, or of the default group.

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
    """The group itself."""
    return dist.distributed_c10d._resolve_process_group(ranks.name)  # type: ignore[attr-defined, arg-type]


def max_over(*groups: Any) -> Reduce:
    """Make the `reduce` that a flag needs where gradients of one model lie on several ranks: its MAX over all of them.

    found_inf = max over ranks of found_inf: one all-reduce of 4 bytes a group, whatever the number of gradients. Over
    the tensor, pipeline and data parallel groups of one process in turn it is the MAX over all their ranks. Pure; put
    into the graph by torch.compile; no host sync.

    Args:
        *groups: ProcessGroups, or DeviceMeshes, each of whose dimensions counts; by default the group of all processes.
            Every rank must call with the groups in one order.

    Returns:
        A function of the flag, for the `reduce` of `unscale_and_check` or `make_train_step`.

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
    """The sum, or the max, over ranks."""
    if ranks.size == 1:
        return x
    if x.is_complex():
        return torch.view_as_complex(all_reduce(torch.view_as_real(x), op, ranks))
    return _waited(torch.ops._c10d_functional.all_reduce(x.contiguous(), op, ranks.name))


def broadcast(x: Tensor, ranks: Ranks) -> Tensor:
    """The first rank's tensor, of any dtype."""
    if ranks.size == 1:
        return x
    data = x.contiguous().reshape(-1).view(torch.uint8)  # gloo does not know every type
    return _waited(torch.ops._c10d_functional.broadcast(data, 0, ranks.name)).view(x.dtype).view(x.shape)


def all_gather(x: Tensor, ranks: Ranks) -> Tensor:
    """The tensors of all ranks, of one shape, along their first dimension."""
    if ranks.size == 1:
        return x
    if x.is_complex():
        return torch.view_as_complex(all_gather(torch.view_as_real(x), ranks))
    return _waited(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), ranks.size, ranks.name))


def reduce_scatter(x: Tensor, ranks: Ranks) -> Tensor:
    """This rank's part, along the first dimension, of the sum over ranks."""
    if ranks.size == 1:
        return x
    if x.is_complex():
        return torch.view_as_complex(reduce_scatter(torch.view_as_real(x), ranks))
    return _waited(torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", ranks.size, ranks.name))


def _waited(x: Tensor) -> Tensor:
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return waited


def _is_mesh(group: Any) -> bool:
    return hasattr(group, "get_all_groups") and hasattr(group, "ndim")
