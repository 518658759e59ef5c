"""Data parallelism in the step: what its processes exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._autograd.tape import Tape
from funcamp._check import boolean, integer
from funcamp._dtensor import as_dtensor_like, local, settled_sum
from funcamp._step.accumulate import Result
from funcamp._step.parallel import Parallel
from funcamp._step.shares import Share, weighed
from funcamp._storage.params import Params, cut, expand
from funcamp._types import Tree
from funcamp.distributed.collectives import (
    Ranks,
    all_gather_each,
    all_reduce,
    all_reduce_each,
    broadcast,
    check_alike,
    comparable,
    largest,
    ranks_of,
)
from funcamp.distributed.shards import summed_slices

_ONE = Ranks("", 1, 0)


@dataclass(frozen=True, init=False, repr=False)
class DataParallel(Parallel):
    """Data parallelism inside the step: one model, a batch per rank; for `parallel` of `make_train_step`.

    Gradients are summed over ranks after the last micro-batch, in their own dtype. There is one all-reduce per group of
    flat storage above 1 MiB, and one per dtype for the smaller groups and the means of loss and buffers. The sum comes
    before the check, so all ranks find an overflow of one rank without another collective. The state stays bit for bit
    equal on all ranks, except buffers that are not averaged; `init` starts from rank 0's values. Auxiliary outputs of
    the loss and counts of taps are per rank. Pure; torch.compile puts the collectives into the step's graph; no host
    sync except in `init`.

    With shard=True each rank stores a slice of the parameters, of the optimizer's state and of the average (ZeRO stages
    1 and 2): all-gather in the compute dtype, forward and backward, reduce-scatter, update of the slice. The norm, the
    flag and the amaxes of delayed float8 share one all-gather of a few numbers. Under `jit` weights in float8 with a
    scale per tensor are gathered in float8; the loss must read such weights elsewhere on all ranks alike, or on none.

    Args:
        group: a ProcessGroup, or a DeviceMesh of one dimension; by default all processes.
        shard: shard the state over the ranks; needs flat storage and elementwise optimizers (your own sees slices).
        dtype: the dtype in which gradients are summed, if not their own: float32 for precision, bfloat16 for less
            traffic.
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

    ranks: Ranks = _ONE
    dtype: torch.dtype | None = None
    mean_buffers: bool = True

    def __init__(
        self,
        group: Any = None,
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
        shard, mean_buffers = boolean(call, "shard", shard), boolean(call, "mean_buffers", mean_buffers)
        super().__init__(None, ranks.size, shard, integer(call, "buckets", buckets, 1))
        vars(self).update(ranks=ranks, dtype=dtype, mean_buffers=mean_buffers)

    def __repr__(self) -> str:
        return f"DataParallel(rank {self.ranks.rank} of {self.ranks.size}{', shard=True' if self.shard else ''})"

    def check(self, call: str, params: Params) -> None:
        """Raise ValueError if the parameters are not laid out as `own_part` does it."""
        if params.ranks == (self.ranks if self.shard else None):
            return
        rule = f"not be sharded; distributed.gather_state gives the full state; got params {params!r}"
        if self.shard:
            made = "as its init and load_state_dict return it"
            rule = f"be sharded over this step's ranks, {made}; got params {params!r} with {self!r}"
        raise ValueError(f"{call}: state must {rule}")

    def agree(self, described: list[str]) -> None:
        """Raise ValueError on all ranks if a rank's step differs from the first rank's; reads the host."""
        own = [(name, getattr(self, name)) for name in ("shard", "dtype", "buckets", "mean_buffers")]
        described = described + [f"{name} of DataParallel is {value}" for name, value in own]
        check_alike("the optimizer and every constant must be the same on all ranks", described, self.ranks)

    def broadcast_first(self, tree: Tree) -> None:
        """Write the first rank's values into tensors that have the same names on all ranks."""
        if self.ranks.size == 1:  # a tensor written onto itself would count as changed
            return
        single = expand(tree)
        named = zip(_tree.names(single), _tree.leaves(single))
        rule = "params and buffers must have the same names, shapes and dtypes on all ranks"
        described = [f"{name} is {_tree.describe(leaf).rpartition(' on ')[0]}" for name, leaf in named]
        check_alike(rule, described, self.ranks)
        for leaf in _tree.leaves(tree):
            if leaf is not None:
                local(leaf).copy_(broadcast(local(leaf), self.ranks))

    def total(self, weight: Tensor) -> Tensor:
        """Return the sum of a number over ranks."""
        return all_reduce(weight, "sum", self.ranks)

    def own_part(self, params: Params) -> Params:
        """Return this rank's slices of flat parameters, or all of them."""
        return cut(params, self.ranks) if self.shard else params

    def joined(
        self, squares: Tensor, finite: Tensor, tapes: Sequence[Tape], records: Sequence[Tree], share: Share
    ) -> tuple[Tensor, Tensor, Sequence[Tree]]:
        """Return the sum of squares and the finite flag over the slices of all ranks, and the records merged.

        At most one collective, if there is one record to merge. A maximum is over the ranks that have a share, infinite
        for NaN.
        """
        if self.ranks.size == 1:
            return squares, finite, records
        merges = [tape.over_ranks is not None for tape in tapes]
        leaves, spec = _tree.flatten([record for record, merge in zip(records, merges) if merge])
        if isinstance(share, Tensor):
            leaves = [torch.where(share == 0, 0.0, leaf) for leaf in leaves]
        if self.shard:
            squares, finite, leaves = self._joined_slices(squares, finite, leaves)
        else:
            leaves = [largest(leaf, self.ranks) for leaf in leaves]
        merged = iter(_tree.unflatten(leaves, spec))
        return squares, finite, [next(merged) if merge else record for record, merge in zip(records, merges)]

    def _joined_slices(
        self, squares: Tensor, finite: Tensor, records: list[Tensor]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the sum of squares, the finite flag and the largest records of all ranks, by one all-gather."""
        wide = squares.dtype
        flat_records = [comparable(record).reshape(-1).to(wide) for record in records]
        (rows,) = all_gather_each([torch.cat([torch.stack([squares, finite.to(wide)]), *flat_records])], self.ranks)
        both, *columns = torch.split(
            rows.view(self.ranks.size, -1), [2, *[record.numel() for record in records]], dim=1
        )
        largest_records = [
            column.amax(0).to(record.dtype).view(record.shape) for column, record in zip(columns, records)
        ]
        return both[:, 0].sum(), (both[:, 1] != 0).all(), largest_records

    def summed(self, result: Result, share: Share, before: dict[str, Tensor]) -> Result:
        """Return the summed gradients, and the means of loss and floating-point buffers weighted by share."""
        grads, loss, after = result.gradients, result.loss, result.buffers
        if self.ranks.size == 1:
            return result._replace(gradients=self._summed(grads, [])[0])
        names = [name for name, value in after.items() if self.mean_buffers and value.is_floating_point()]
        values = [loss, *[after[name] for name in names]]
        wide = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
        parts = [weighed(value.reshape(-1).to(wide), share) for value in values]
        if names:  # last, so that a buffer that no rank wrote keeps its bits
            written = [(after[name] != before[name]).any().to(wide) for name in names]
            parts.append(weighed(torch.stack(written), share))
        if isinstance(share, Tensor):  # the backward pass of a mean over 0 examples gives NaN
            grads = _tree.map_leaves(lambda leaf: torch.where(share == 0, 0.0, leaf), *_tree.flatten(grads))
        grads, (total,) = self._summed(grads, [torch.cat(parts)])
        mean, *sums = torch.split(total, [part.numel() for part in parts])
        new = {}
        for place, name in enumerate(names):
            old = before[name]
            new[name] = torch.where(sums[-1][place] == 0, old, sums[place].view(old.shape)).to(old.dtype)
        return result._replace(gradients=grads, loss=mean.reshape(()).to(loss.dtype), buffers={**after, **new})

    def _summed(self, grads: Params, more: list[Tensor]) -> tuple[Params, list[Tensor]]:
        """Sum gradients and further tensors over ranks."""
        flat, spec = _tree.flatten(grads)
        values = [settled_sum(leaf) for leaf in flat]
        if self.dtype is not None:
            values = [v if v is None or v.is_complex() else v.to(self.dtype) for v in values]
        if self.ranks.size == 1 and not self.shard:
            return _tree.unflatten(values, spec), more
        if self.shard:
            slices = summed_slices(Params(tuple(values), grads.layout), self.ranks)
            return slices, all_reduce_each(more, self.ranks)
        order = grads.layout.last_first()
        held = [number for number in order if values[number] is not None]
        sums = all_reduce_each([*[local(values[number]) for number in held], *more], self.ranks)
        for number, value in zip(held, sums):
            values[number] = as_dtensor_like(values[number], value)
        return _tree.unflatten(values, spec), sums[len(held) :]
