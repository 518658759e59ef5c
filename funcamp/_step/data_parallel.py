"""What the processes of a data-parallel step tell each other; alone, a process tells nobody.

    share_r = w_r / sum over ranks of w        how much a rank's batch counts; 1 / ranks without weights
    grads   = sum over ranks of d(scale * share_r * loss_r) / d(params)

The loss is multiplied, not the gradient divided: the gradient of every example is what one process with all of them
would have, underflow and overflow included.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._check import boolean, integer
from funcamp._distributed.collectives import Ranks, all_reduce, all_reduce_each, broadcast, check_alike, ranks_of
from funcamp._distributed.dtensor import as_part_of, local, settled_sum
from funcamp._storage.flat import FlatParams
from funcamp._storage.shards import Shards, cut, summed_slices
from funcamp._types import Reduce, Tree

#: What a rank's loss is multiplied by: a number, or a tensor of shape ().
Share: TypeAlias = "float | Tensor"


class Alone:
    """One process, or several that tell each other the flag by a function of its own."""

    shard = False
    buckets = 1

    def __init__(self, reduce: Reduce | None = None) -> None:
        self.reduce = reduce

    def share(self, batch: Any, device: torch.device) -> Share:  # noqa: ARG002
        """What this process's loss is multiplied by."""
        return 1.0

    def check(self, params: Tree) -> None:
        """Raise ValueError where the parameters are not laid out as `stored` does it."""
        if isinstance(params, Shards):
            raise ValueError(f"step: state must be whole, as distributed.gather_state gives it; got params {params!r}")

    def agree(self, described: list[str]) -> None:
        """Raise ValueError where a rank describes its step otherwise than the first."""

    def same(self, tree: Tree) -> None:
        """Write the first rank's values into a tree, for a state that is to be equal everywhere."""

    def stored(self, params: Tree) -> Tree:
        """What of the parameters this process keeps."""
        return params

    def joined(self, squares: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of squares and the verdict on what all ranks hold."""
        return squares, finite

    def exchanged(
        self,
        share: Share,  # noqa: ARG002
        grads: Tree,
        loss: Tensor,
        before: dict[str, Tensor],  # noqa: ARG002
        after: dict[str, Tensor],
    ) -> tuple[Tree, Tensor, dict[str, Tensor]]:
        """The gradients summed, laid out as the stored parameters, and the means of the loss and of the buffers."""
        flat, spec = _tree.flatten(grads)
        return _tree.map_leaves(settled_sum, flat, spec), loss, after


class DataParallel(Alone):
    """Data parallelism inside the step: every rank its batch, one model; for the `parallel` of `make_train_step`.

    Gradients are summed over ranks, in their own precision, after the last micro-batch of a window: by one all-reduce
    for each group of flat storage above a mebibyte, and one for the others of a dtype and the means of loss and
    buffers. They are summed before they are checked, so an overflow on one rank is found on all, without a collective
    of its own. The state stays bit for bit equal over ranks, but for buffers that are not averaged; `init` begins with
    rank 0's values. What the loss returns beside itself and what taps count stay each rank's. Pure; put into the step's
    graph by torch.compile; no host sync but in `init`.

    With shard=True each rank stores a slice of the parameters, of the optimizer's state and of the average (ZeRO stages
    1 and 2): all-gather in the compute dtype, forward and backward, reduce-scatter, update of the slice. Clipping by
    norm and the verdict share one all-reduce of two numbers.

    Args:
        group: a ProcessGroup, or a DeviceMesh of one dimension; by default all processes.
        shard: cut the state over the ranks; with flat storage and elementwise optimizers (one of your own sees slices).
        dtype: what gradients are summed in where it is not their own dtype: float32 for precision, bfloat16 for bytes.
        weight: `(batch) -> number or tensor of shape ()`: how much a rank's batch counts, its number of examples or of
            tokens, for batches that differ (a last, uneven one). A rank with weight 0 changes nothing; NaN, or 0 on all
            ranks, skips the step. It sees a whole window, whose micro-batches count alike. Costs one all-reduce of a
            number before the backward pass. By default all count alike.
        buckets: how many parts flat storage has, in the order of the parameters: under `jit` the collective of a part
            begins when its gradients are there, beside the backward pass of the parts before. Worth it where
            communication takes long; each part adds a few collectives and kernels.
        mean_buffers: average floating-point buffers (BatchNorm's statistics) over ranks; False leaves each its own, as
            integer and complex ones are.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: group is a mesh of several dimensions or lacks this process; dtype is no floating-point type;
            buckets is not 1 or more.
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

    def __init__(
        self,
        group: Any = None,
        *,
        shard: bool = False,
        dtype: torch.dtype | None = None,
        weight: Callable[[Any], float | Tensor] | None = None,
        buckets: int = 1,
        mean_buffers: bool = True,
    ) -> None:
        call = "DataParallel"
        self.ranks: Ranks = ranks_of(call, group)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"{call}: dtype must be a torch.dtype; got {dtype!r}")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"{call}: dtype must be a floating-point type; got {dtype}")
        if weight is not None and not callable(weight):
            raise TypeError(f"{call}: weight must be a function of the batch; got {weight!r}")
        super().__init__()
        self.shard, self.buckets = boolean(call, "shard", shard), integer(call, "buckets", buckets, 1)
        self._dtype, self._weight = dtype, weight
        self._mean_buffers = boolean(call, "mean_buffers", mean_buffers)

    def __repr__(self) -> str:
        return f"DataParallel(rank {self.ranks.rank} of {self.ranks.size}{', shard=True' if self.shard else ''})"

    def share(self, batch: Any, device: torch.device) -> Share:
        """What this rank's loss is multiplied by; NaN where a tensor of weight is negative."""
        if self._weight is None:
            return 1.0 / self.ranks.size
        weight = self._weight(batch)
        if isinstance(weight, Tensor):
            if weight.dim():
                raise ValueError(f"DataParallel: weight must return a tensor of shape (); got {_tree.describe(weight)}")
            weight = weight.to(device, torch.float64)
            weight = torch.where(weight < 0, math.nan, weight)
        else:
            if not 0 <= weight < math.inf:
                raise ValueError(f"DataParallel: weight must return 0 or a positive number; got {weight!r}")
            weight = torch.full((), float(weight), dtype=torch.float64, device=device)
        return weight / all_reduce(weight, "sum", self.ranks)

    def check(self, params: Tree) -> None:
        """Raise ValueError where the parameters are not laid out as `stored` does it."""
        if not self.shard:
            super().check(params)
        elif not isinstance(params, Shards) or params.ranks != self.ranks:
            raise ValueError(
                "step: state must be cut over this step's ranks, as its init and load_state_dict give it; got params "
                f"{params!r} with {self!r}"
            )

    def agree(self, described: list[str]) -> None:
        """Raise ValueError, on all ranks, where one describes its step otherwise than the first; reads the host."""
        own = {"shard": self.shard, "dtype": self._dtype, "buckets": self.buckets, "mean_buffers": self._mean_buffers}
        described = described + [f"{name} of DataParallel is {value}" for name, value in own.items()]
        check_alike("the optimizer and every constant must be the same on all ranks", described, self.ranks)

    def same(self, tree: Tree) -> None:
        """Write the first rank's values into tensors that all ranks know by the same names."""
        single = _tree.expand(tree)
        named = zip(_tree.names(single), _tree.leaves(single))
        rule = "params and buffers must have the same names, shapes and dtypes on all ranks"
        described = [f"{name} is {_tree.describe(leaf).rpartition(' on ')[0]}" for name, leaf in named]
        check_alike(rule, described, self.ranks)
        for leaf in _tree.leaves(tree):
            if leaf is not None:
                local(leaf).copy_(broadcast(local(leaf), self.ranks))

    def stored(self, params: Tree) -> Tree:
        """This rank's slices of flat parameters, or all of them."""
        return cut(params, self.ranks) if self.shard else params

    def joined(self, squares: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of squares and the verdict on the slices of all ranks, in one all-reduce."""
        if not self.shard:
            return squares, finite
        total = all_reduce(torch.stack([squares, (~finite).to(squares.dtype)]), "sum", self.ranks)
        return total[0], total[1] == 0

    def exchanged(
        self, share: Share, grads: Tree, loss: Tensor, before: dict[str, Tensor], after: dict[str, Tensor]
    ) -> tuple[Tree, Tensor, dict[str, Tensor]]:
        """The gradients' sums, and the means of loss and floating-point buffers, each rank's by its share."""
        if self.ranks.size == 1:
            return self._summed(grads, [])[0], loss, after
        names = [name for name, value in after.items() if self._mean_buffers and value.is_floating_point()]
        values = [loss, *[after[name] for name in names]]
        wide = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
        parts = [weighed(value.reshape(-1).to(wide), share) for value in values]
        if names:  # last of all: a buffer that no rank wrote keeps its bits
            written = [(after[name] != before[name]).any().to(wide) for name in names]
            parts.append(weighed(torch.stack(written), share))
        if isinstance(share, Tensor):  # a backward pass makes NaN of 0 where it divides by a count
            grads = _tree.map_leaves(lambda leaf: torch.where(share == 0, 0.0, leaf), *_tree.flatten(grads))
        grads, (total,) = self._summed(grads, [torch.cat(parts)])
        mean, *sums = torch.split(total, [part.numel() for part in parts])
        new = {}
        for place, name in enumerate(names):
            old = before[name]
            new[name] = torch.where(sums[-1][place] == 0, old, sums[place].view(old.shape)).to(old.dtype)
        return grads, mean.reshape(()).to(loss.dtype), {**after, **new}

    def _summed(self, grads: Tree, more: list[Tensor]) -> tuple[Tree, list[Tensor]]:
        """The sums over ranks of gradients and of more tensors."""
        flat, spec = _tree.flatten(grads)
        values = [settled_sum(leaf) for leaf in flat]
        if self._dtype is not None:
            values = [v if v is None or v.is_complex() else v.to(self._dtype) for v in values]
        if isinstance(grads, FlatParams) and self.shard:
            slices = summed_slices(FlatParams(tuple(values), grads.layout), self.ranks)
            return slices, all_reduce_each(more, self.ranks)
        order = grads.layout.last_first() if isinstance(grads, FlatParams) else range(len(values))
        held = [number for number in order if values[number] is not None]
        sums = all_reduce_each([*[local(values[number]) for number in held], *more], self.ranks)
        for number, value in zip(held, sums):
            values[number] = as_part_of(values[number], value)
        return _tree.unflatten(values, spec), sums[len(held) :]


def weighed(value: Tensor, share: Share, parts: int = 1) -> Tensor:
    """A value times a rank's share; 0 where the share is 0, whatever the value (the mean of no examples is NaN)."""
    value = value if parts == 1 else value / parts
    if not isinstance(share, Tensor):
        return value if share == 1.0 else value * share
    share = share.to(torch.promote_types(value.dtype, torch.float32))
    return torch.where(share == 0, torch.zeros_like(value), value * share)
