"""Data parallelism in the step: what its processes exchange."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._check import boolean, integer
from funcamp._dtensor import as_dtensor_like, local, settled_sum
from funcamp._step.accumulate import Result, Share, weighed
from funcamp._step.parallel import Parallel
from funcamp._storage.params import Params, cut, expand
from funcamp._types import Tree
from funcamp.distributed.collectives import (
    Group,
    Ranks,
    all_gather_each,
    all_reduce,
    all_reduce_each,
    broadcast,
    check_alike,
    ranks_of,
)
from funcamp.distributed.shards import summed_slices

#: The ranks of one process.
_ONE_RANK = Ranks("", 1, 0)


@dataclass(frozen=True, init=False, repr=False)
class DataParallel(Parallel):
    """Data parallelism inside the step: one model, a batch per rank; for `parallel` of `make_train_step`.

    Gradients are summed over ranks after the last micro-batch, in their own dtype. There is one all-reduce per group of
    flat storage above 1 MiB, and one per dtype for the smaller groups and the means of loss and buffers. The sum comes
    before the check, so all ranks find an overflow of one rank without another collective. The state stays bit for bit
    equal on all ranks, except buffers that are not averaged; `init` starts from rank 0's values. A flag that is set in
    a state before a step must be set on all ranks. Auxiliary outputs of
    the loss and counts of taps are per rank. Pure; torch.compile puts the collectives into the step's graph; no host
    sync except in `init`.

    With shard=True each rank stores a slice of the parameters, of the optimizer's state and of the average (ZeRO stages
    1 and 2): all-gather in float32, forward and backward, reduce-scatter, update of the slice. The norm and
    the flag share one all-gather of two numbers.

    Args:
        group: a ProcessGroup, or a DeviceMesh of one dimension; by default all processes.
        shard: shard the state over the ranks; needs flat storage and elementwise optimizers (your own sees slices).
        dtype: the dtype in which gradients are summed, if not their own, float32: bfloat16 for less traffic.
        buckets: number of parts of flat storage, in the order of the parameters. Under `jit` the collective of a part
            starts when its gradients are ready and overlaps the backward pass of the earlier parts. Useful if
            communication is slow; each part adds a few collectives and kernels.
        mean_buffers: average floating-point buffers (BatchNorm's statistics) over ranks; False keeps each rank's.
            Integer and complex buffers are never averaged.

    Raises:
        TypeError: an argument has another type.
        ValueError: group is a mesh of several dimensions or lacks this process; dtype is not a floating-point type;
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

    ranks: Ranks = _ONE_RANK
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
        ranks = ranks_of(call, group)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"{call}: dtype must be a torch.dtype; got {dtype!r}")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"{call}: dtype must be a floating-point type; got {dtype}")
        checked_shard = boolean(call, "shard", shard)
        checked_mean_buffers = boolean(call, "mean_buffers", mean_buffers)
        checked_buckets = integer(call, "buckets", buckets, 1)
        # No reduction of the flag: the sum of the gradients carries an overflow to all ranks.
        super().__init__(reduce=None, size=ranks.size, shard=checked_shard, buckets=checked_buckets)
        # The class is frozen, and its arguments are not its fields: a group is stored as its constants.
        vars(self).update(ranks=ranks, dtype=dtype, mean_buffers=checked_mean_buffers)

    def __repr__(self) -> str:
        sharding = ", shard=True" if self.shard else ""
        return f"DataParallel(rank {self.ranks.rank} of {self.ranks.size}{sharding})"

    def check(self, call: str, params: Params) -> None:
        """Raise ValueError if the parameters are not laid out as `own_part` does it."""
        expected_ranks = self.ranks if self.shard else None
        if params.ranks == expected_ranks:
            return
        if self.shard:
            raise ValueError(
                f"{call}: state must be sharded over this step's ranks, as its init and load_state_dict return it; got "
                f"params {params!r} with {self!r}"
            )
        raise ValueError(
            f"{call}: state must not be sharded; distributed.gather_state gives the full state; got params {params!r}"
        )

    def agree(self, described: list[str]) -> None:
        """Raise ValueError on all ranks if a rank's step differs from the first rank's; reads the host."""
        options = {
            "shard": self.shard,
            "dtype": self.dtype,
            "buckets": self.buckets,
            "mean_buffers": self.mean_buffers,
        }
        described = described + [f"{name} of DataParallel is {value}" for name, value in options.items()]
        check_alike("the optimizer and every constant must be the same on all ranks", described, self.ranks)

    def broadcast_first(self, tree: Tree) -> None:
        """Write the first rank's values into tensors that have the same names on all ranks."""
        if self.ranks.size == 1:  # a tensor written onto itself would count as changed
            return
        # Tensors are compared one by one under their names, and sent in groups.
        by_tensor = expand(tree)
        described: list[str] = []
        for name, leaf in zip(_tree.names(by_tensor), _tree.leaves(by_tensor)):
            without_device, _, _ = _tree.describe(leaf).rpartition(" on ")
            described.append(f"{name} is {without_device}")
        check_alike(
            "params and buffers must have the same names, shapes and dtypes on all ranks", described, self.ranks
        )
        for leaf in _tree.leaves(tree):
            if leaf is not None:
                local(leaf).copy_(broadcast(local(leaf), self.ranks))

    def sum_of_weights(self, weight: Tensor) -> Tensor:
        """Return the sum of a number over ranks."""
        return all_reduce(weight, "sum", self.ranks)

    def own_part(self, params: Params) -> Params:
        """Return this rank's slices of flat parameters, or all of them."""
        return cut(params, self.ranks) if self.shard else params

    def joined(self, squares: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of squares and the finite flag over the slices of all ranks, by one all-gather."""
        if self.ranks.size == 1 or not self.shard:
            return squares, finite
        own = torch.stack([squares, finite.to(squares.dtype)])
        (gathered,) = all_gather_each([own], self.ranks)
        rows = gathered.view(self.ranks.size, 2)  # a row per rank
        return rows[:, 0].sum(), (rows[:, 1] != 0).all()

    def summed(self, result: Result, share: Share, before: dict[str, Tensor]) -> Result:
        """Return the summed gradients, and the means of loss and floating-point buffers weighted by share."""
        gradients = result.gradients
        if self.ranks.size == 1:
            summed_gradients, _ = self._summed(gradients, [])
            return result._replace(gradients=summed_gradients)
        names = [name for name, value in result.buffers.items() if self.mean_buffers and value.is_floating_point()]
        shares_of_means = _shares_of_means(result, share, before, names)
        if isinstance(share, Tensor):  # the backward pass of a mean over 0 examples gives NaN
            leaves, spec = _tree.flatten(gradients)
            gradients = _tree.map_leaves(lambda leaf: torch.where(share == 0, 0.0, leaf), leaves, spec)
        summed_gradients, (means,) = self._summed(gradients, [torch.cat(shares_of_means)])
        mean_loss, *sums = torch.split(means, [values.numel() for values in shares_of_means])
        buffers = dict(result.buffers)
        for number, name in enumerate(names):
            buffer_before = before[name]
            share_that_wrote = sums[-1][number]
            mean = sums[number].view(buffer_before.shape)
            buffers[name] = torch.where(share_that_wrote == 0, buffer_before, mean).to(buffer_before.dtype)
        loss = mean_loss.reshape(()).to(result.loss.dtype)
        return result._replace(gradients=summed_gradients, loss=loss, buffers=buffers)

    def _summed(self, gradients: Params, more: list[Tensor]) -> tuple[Params, list[Tensor]]:
        """Sum gradients and further tensors over ranks."""
        leaves, spec = _tree.flatten(gradients)
        groups: list[Tensor | None] = [None if leaf is None else settled_sum(leaf) for leaf in leaves]
        if self.dtype is not None:
            groups = [_in_dtype(group, self.dtype) for group in groups]
        if self.ranks.size == 1 and not self.shard:
            return _tree.unflatten(groups, spec), more
        if self.shard:
            slices = summed_slices(Params(tuple(groups), gradients.layout), self.ranks)
            return slices, all_reduce_each(more, self.ranks)
        # In the order in which gradients complete, so that a collective can overlap the rest of the backward pass.
        present_groups: dict[int, Tensor] = {}
        for number in gradients.layout.last_first():
            group = groups[number]
            if group is not None:
                present_groups[number] = group
        local_groups = [local(group) for group in present_groups.values()]
        sums = all_reduce_each([*local_groups, *more], self.ranks)
        for (number, group), summed_group in zip(present_groups.items(), sums):
            groups[number] = as_dtensor_like(group, summed_group)
        return _tree.unflatten(groups, spec), sums[len(present_groups) :]


def _shares_of_means(result: Result, share: Share, before: dict[str, Tensor], names: list[str]) -> list[Tensor]:
    """Return this rank's shares of what is averaged over ranks, one-dimensional and in one dtype.

    Args:
        result: of this rank.
        share: of this rank.
        before: the buffers before the step.
        names: the names of the buffers that are averaged.

    Returns:
        The shares of the loss and of each buffer; if there are buffers, then also for each whether the forward pass
        wrote it, so that one that no rank wrote keeps its bits.
    """
    values = [result.loss, *[result.buffers[name] for name in names]]
    has_float64 = any(value.dtype == torch.float64 for value in values)
    dtype = torch.float64 if has_float64 else torch.float32
    shares = [weighed(value.reshape(-1).to(dtype), share) for value in values]
    if names:
        is_written = [(result.buffers[name] != before[name]).any().to(dtype) for name in names]
        shares.append(weighed(torch.stack(is_written), share))
    return shares


def _in_dtype(group: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a group of gradients in the dtype in which they are summed; complex ones in their own."""
    if group is None or group.is_complex():
        return group
    return group.to(dtype)
