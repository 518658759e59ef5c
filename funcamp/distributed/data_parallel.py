"""Data parallelism in the step: what its processes exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._check import boolean, integer
from funcamp._dtensor import as_dtensor_like, is_distributed, local, sum_partials
from funcamp._step.accumulate import Result
from funcamp._step.parallel import Parallel
from funcamp._step.shares import Share, weighed
from funcamp._step.state import TrainState
from funcamp._storage.params import Params, expand
from funcamp._types import Tree
from funcamp.distributed.collectives import (
    Group,
    Ranks,
    all_reduce,
    all_reduce_each,
    broadcast,
    check_alike,
    is_mesh,
    mesh_of,
    ranks_of,
    size_of,
    sum_placed_like,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, init=False, repr=False)
class DataParallel(Parallel):
    """Data parallelism inside the step: one model, a batch per rank; for `parallel` of `make_train_step`.

    Gradients are summed over ranks after the last micro-batch, in their own dtype. There is one all-reduce per group of
    flat storage above 1 MiB, and one per dtype for the smaller groups and the means of loss and buffers. The sum comes
    before the check, so all ranks find an overflow of one rank without another collective. The state stays bit for bit
    equal on all ranks, except buffers that are not averaged; `init` starts from rank 0's values. A flag that is set in
    a state before a step must be set on all ranks. Auxiliary outputs of the loss and counts of taps are per rank. Pure;
    torch.compile puts the collectives into the step's graph; no host sync except in `init`.

    With shard=True the groups of the parameters, of the optimizer's state and of the average are DTensors with
    `Shard(0)`, of which each rank stores a part (ZeRO stages 1 and 2): all-gather in float32, forward and backward,
    reduce-scatter, update of the part; one collective per group of flat storage, and one each for the norm and the
    flag. With a mesh of two dimensions the state is sharded over the second, and the first has replicas (HSDP): the
    sums of the parts are summed over it.

    Args:
        group: a ProcessGroup, or a DeviceMesh of one dimension; with shard=True also one of (replicas, shards). By
            default all processes.
        shard: shard the state over the ranks; needs flat storage and torch.optim's elementwise classes.
        dtype: the dtype in which gradients are summed, if not their own, float32: bfloat16 for less traffic.
        buckets: number of parts of flat storage, in the order of the parameters. Under `jit` the collective of a part
            starts when its gradients are ready and overlaps the backward pass of the earlier parts. Useful if
            communication is slow; each part adds a few collectives and kernels.
        mean_buffers: average floating-point buffers (BatchNorm's statistics) over ranks; False keeps each rank's.
            Integer and complex buffers are never averaged.

    Raises:
        TypeError: an argument has another type.
        ValueError: group is a mesh of more dimensions or lacks this process; dtype is not a floating-point type;
            buckets is below 1.
        RuntimeError: torch.distributed is not initialized.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> loss_fn = module_loss(torch.nn.Linear(4, 1), torch.nn.functional.mse_loss)
        >>> step = make_train_step(loss_fn, stateless(torch.optim.AdamW), parallel=distributed.DataParallel())
        >>> state, metrics = step(step.init(), (torch.ones(8, 4), torch.zeros(8, 1)))
        >>> metrics.found_inf
        tensor(0.)
        >>> dist.destroy_process_group()

    References:
        Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020; Rajbhandari et al.,
        "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
    """

    dims: tuple[Ranks, ...] = ()
    mesh: DeviceMesh | None = None
    dtype: torch.dtype | None = None
    mean_buffers: bool = True

    def __init__(
        self,
        group: Group | None = None,
        *,
        shard: bool = False,
        dtype: torch.dtype | None = None,
        buckets: int = 1,
        mean_buffers: bool = True,
    ) -> None:
        call = "DataParallel"
        dims = tuple(ranks_of(call, group))
        checked_shard = boolean(call, "shard", shard)
        if len(dims) > 1 + checked_shard:
            raise ValueError(
                f"{call}: group must be a mesh of one dimension, as mesh['dp'] is, or with shard=True of two, "
                f"(replicas, shards); got {group!r}"
            )
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"{call}: dtype must be a torch.dtype; got {dtype!r}")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"{call}: dtype must be a floating-point type; got {dtype}")
        checked_mean_buffers = boolean(call, "mean_buffers", mean_buffers)
        checked_buckets = integer(call, "buckets", buckets, 1)
        # No reduction of the flag: the sum of the gradients carries an overflow to all ranks.
        super().__init__(size=size_of(dims), shard=checked_shard, buckets=checked_buckets)
        # The class is frozen, and its arguments are not its fields: a group is stored as its constants.
        mesh = group if is_mesh(group) else None
        vars(self).update(dims=dims, mesh=mesh, dtype=dtype, mean_buffers=checked_mean_buffers)

    def __repr__(self) -> str:
        sharding = ", shard=True" if self.shard else ""
        ranks = ", ".join(f"rank {ranks.rank} of {ranks.size}" for ranks in self.dims)
        return f"DataParallel({ranks}{sharding})"

    def check(self, call: str, params: Params) -> None:
        """Raise ValueError if the parameters are not stored as `own_part` returns them."""
        if not self.shard:
            super().check(call, params)
            return
        if torch.compiler.is_dynamo_compiling():  # Dynamo does not know a mesh's groups (2.13)
            return
        for group in params.groups:
            if group is not None and not self._is_placed(group):
                raise ValueError(
                    f"{call}: state must be sharded over this step's ranks, as its init and load_state_dict return it; "
                    f"got params {params!r} with {self!r}"
                )

    def _is_placed(self, group: Tensor) -> bool:
        """Return whether a group is a DTensor on this step's ranks."""
        if not is_distributed(group):
            return False
        if self.mesh is not None:  # the groups of a DTensor may be those of any mesh that is equal to its own
            return bool(group.device_mesh == self.mesh)
        names = [str(process_group.group_name) for process_group in group.device_mesh.get_all_groups()]
        return names == [ranks.name for ranks in self.dims]

    def agree(self, lines: list[str]) -> None:
        """Raise ValueError on all ranks if a rank's step differs from the first rank's; reads the host."""
        names = ("shard", "dtype", "buckets", "mean_buffers")
        options = [f"{name} of DataParallel is {getattr(self, name)}" for name in names]
        check_alike("the optimizer and every constant must be the same on all ranks", lines + options, self.dims)

    def broadcast_first(self, tree: Tree) -> None:
        """Write the first rank's values into tensors that have the same names on all ranks."""
        if self.size == 1:  # a tensor written onto itself would count as changed
            return
        # Tensors are compared one by one under their names, and sent in groups.
        by_tensor = expand(tree)
        labels = tree.layout.label_of() if isinstance(tree, Params) else {}
        described: list[str] = []
        for name, leaf in zip(_tree.names(by_tensor), _tree.leaves(by_tensor)):
            without_device, _, _ = _tree.describe(leaf).rpartition(" on ")
            described.append(f"{name} is {without_device}, of group {labels.get(name, '')!r}")
        rule = "params and buffers must have the same names, shapes, dtypes and groups on all ranks"
        check_alike(rule, described, self.dims)
        for leaf in _tree.leaves(tree):
            if leaf is not None:
                local(leaf).copy_(broadcast(local(leaf), self.dims))

    def sum_of_weights(self, weight: Tensor) -> Tensor:
        """Return the sum of a number over ranks."""
        return all_reduce(weight, "sum", self.dims)

    def own_part(self, params: Params) -> Params:
        """Return flat parameters as DTensors of which this rank stores a part, or as they are; no collective."""
        if not self.shard:
            return params
        return Params(tuple([self._own_part_of(group) for group in params.groups]), params.layout)

    def _own_part_of(self, group: Tensor | None) -> Tensor | None:
        """Return a group as a DTensor; as it is if it is one number, such as an optimizer's step count."""
        if group is None or not group.dim():
            return group
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # half a second to import

        mesh = self.mesh or mesh_of(self.dims[0], group.device.type)
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
        whole = distribute_tensor(group, mesh, placements, src_data_rank=None)
        return as_dtensor_like(whole, local(whole).clone())  # older versions give a view

    def summed(self, result: Result, share: Share, before: TrainState) -> Result:
        """Return the summed gradients, and the means of loss and floating-point buffers weighted by share."""
        gradients = result.gradients
        if self.size == 1:
            summed_gradients, _ = self._summed(gradients, before.params, [])
            return result._replace(gradients=summed_gradients)
        if isinstance(share, Tensor):  # the backward pass of a mean over 0 examples gives NaN
            leaves, spec = _tree.flatten(gradients)
            gradients = _tree.map_leaves(lambda leaf: torch.where(share == 0, 0.0, leaf), leaves, spec)

        # One tensor has all that is averaged. A buffer that no rank wrote keeps its bits.
        names = [name for name, value in result.buffers.items() if self.mean_buffers and value.is_floating_point()]
        are_written = [(result.buffers[name] != before.buffers[name]).any() for name in names]
        values = [result.loss, *[result.buffers[name] for name in names], *are_written]
        summed_gradients, (sums,) = self._summed(gradients, before.params, [_joined_shares(values, share)])
        mean_loss, *means = _taken_apart(sums, values)
        buffer_means, written_shares = means[: len(names)], means[len(names) :]

        buffers = dict(result.buffers)
        for name, mean, written_share in zip(names, buffer_means, written_shares):
            buffer_before = before.buffers[name]
            buffers[name] = torch.where(written_share == 0, buffer_before, mean).to(buffer_before.dtype)
        return result._replace(gradients=summed_gradients, loss=mean_loss.to(result.loss.dtype), buffers=buffers)

    def _summed(self, gradients: Params, params: Params, more: list[Tensor]) -> tuple[Params, list[Tensor]]:
        """Return the sums over ranks of gradients, placed as the parameters are, and of further tensors."""
        leaves, spec = _tree.flatten(gradients)
        groups: list[Tensor | None] = [None if leaf is None else sum_partials(leaf) for leaf in leaves]
        if self.dtype is not None:
            groups = [_in_dtype(group, self.dtype) for group in groups]
        # In the order in which gradients complete, so that a collective can overlap the rest of the backward pass.
        present_groups: dict[int, Tensor] = {}
        for number in gradients.layout.last_first():
            group = groups[number]
            if group is not None:
                present_groups[number] = group
        if self.shard:
            for number, group in present_groups.items():
                stored = params.groups[number]
                assert is_distributed(stored)
                groups[number] = sum_placed_like(stored, group)
            return _tree.unflatten(groups, spec), all_reduce_each(more, self.dims)
        local_groups = [local(group) for group in present_groups.values()]
        sums = all_reduce_each([*local_groups, *more], self.dims)
        for (number, group), summed_group in zip(present_groups.items(), sums):
            groups[number] = as_dtensor_like(group, summed_group)
        return _tree.unflatten(groups, spec), sums[len(present_groups) :]


def _joined_shares(values: list[Tensor], share: Share) -> Tensor:
    """Return this rank's shares of values one after the other, in one dtype."""
    has_float64 = any(value.dtype == torch.float64 for value in values)
    dtype = torch.float64 if has_float64 else torch.float32
    return weighed(torch.cat([value.reshape(-1).to(dtype) for value in values]), share)


def _taken_apart(joined: Tensor, likes: list[Tensor]) -> list[Tensor]:
    """Return the parts of what was joined, in the shapes of some tensors."""
    parts = torch.split(joined, [like.numel() for like in likes])
    return [part.view(like.shape) for part, like in zip(parts, likes)]


def _in_dtype(group: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a group of gradients in the dtype in which they are summed; complex ones in their own."""
    if group is None or group.is_complex():
        return group
    return group.to(dtype)
