"""`make_train_step`: check the options of a training step and build it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._autograd.loss import Loss, check_function, loss
from funcamp._check import integer
from funcamp._optim.average import check_decay
from funcamp._optim.chain import check_averages_are_found, check_nothing_is_clipped_last, group_functions_in
from funcamp._optim.clip import check_limit
from funcamp._optim.part import check_optimizer
from funcamp._scaler.config import ScalerConfig, check_config
from funcamp._step.options import Options
from funcamp._step.parallel import Parallel
from funcamp._step.step import TrainStep
from funcamp._storage.policy import check_policy
from funcamp._types import Tree


def make_train_step(
    loss_fn: Callable[..., Tree],
    optimizer: Any,
    config: ScalerConfig = ScalerConfig(),
    *,
    policy: str | torch.dtype | None = None,
    max_norm: float | Tensor | None = None,
    max_value: float | Tensor | None = None,
    accumulate: int = 1,
    weight: Callable[[Tree], float | Tensor] | None = None,
    ema_decay: float | None = None,
    parallel: Parallel | None = None,
    observe: Mapping[str, Callable[[Tree], Tree]] | None = None,
) -> TrainStep:
    """Build a pure training step from a loss function and an optimizer.

    One call scales the loss, differentiates it, finds non-finite gradients and their norm in one reading, unscales and
    clips inside the optimizer's arithmetic, and updates the scale. A step with a non-finite gradient changes only the
    scaler's state and the counts: parameters, moments, schedule, average and buffers keep their bits (buffers not with
    `module_loss(keep_buffers=True)`). The loss is not looked at, only its gradients. No sync.
    Compile the full step: `jit(step)`, or `torch.compile(step, fullgraph=True)`.

    Args:
        loss_fn: a loss of `module_loss`, a function `(params, batch) -> loss` of any pytree of parameters, or a
            function with more inputs or outputs, described by `loss`.
        optimizer: the result of `stateless` or `by_group`, or any object with such an init and update, which gets every
            parameter in its shape. If it has `learning_rate(opt_state)`, the metrics include the rate.
        config: the scaler's configuration. The default scales the loss in every precision, from 2**16 on, as torch's
            GradScaler does; float16 needs it, and whether a loss of yours uses float16 is not known here. If nothing
            does (bfloat16, float32), `presets.disabled()` has the constant scale 1; a line of the log at level INFO
            reports it when a step is built with the default and without a float16 policy.
        policy: a dtype, torch.float16 or torch.bfloat16, or its name: the loss runs under torch.autocast, which casts
            activations and float32 weights at their use: those of linear layers, convolutions and products, not those
            of embeddings and norms. None and float32: no autocast; the loss may use it itself.
        max_norm: clip gradients to this global 2-norm; a positive number or a tensor of shape ().
        max_value: clamp gradients to this magnitude; not with max_norm.
        accumulate: number of micro-batches in a step. Their gradients of loss / count are summed in the parameters'
            dtype, with one scale, one check and one update; see weight for micro-batches that differ.
        weight: `(batch) -> number or tensor of shape ()`: how much a micro-batch counts, such as the number of tokens
            of which its loss is the mean. The step is then that of the mean over all tokens of the window, on all
            ranks; over ranks it costs an all-reduce of a number before the backward pass. Gets one micro-batch: without
            accumulate the batch. One with weight 0 changes nothing. A number that is negative or not finite is an
            error. The value of a tensor is not read: such a one, and 0 for all, skips the step as a gradient that is
            not finite does, which lowers the scale. By default micro-batches and ranks count equally.
        ema_decay: store an average of the parameters with this decay in `TrainState.ema`.
        parallel: a `distributed.DataParallel`, with which every rank takes its own batch of one common step.
        observe: a dict of names to pure functions of the unscaled gradients before clipping, a pytree like the
            parameters given to `init`. They return pytrees of tensors (no None), which are in `Metrics.observed`.
            `{"found_inf_by_leaf": funcamp.found_inf_by_leaf}` shows which gradients are non-finite, in the order of
            `leaf_names(state.params)`. Reads the gradients once more.

    Returns:
        A `TrainStep`: call it as `(state, batch) -> (state, metrics)`. Its `init` returns the first `TrainState`, its
        `loss` evaluates a batch. The metrics are a `Metrics`.

    Raises:
        TypeError: an argument is not of the type given above.
        ValueError: a number is out of range; both max_norm and max_value are given; observe is given
            with `DataParallel(shard=True)`, whose ranks have parts of the gradients.

    Example:
        >>> loss_fn = module_loss(torch.nn.Linear(4, 1), torch.nn.functional.mse_loss)
        >>> config = ScalerConfig(init_scale=2.0**10)
        >>> step = make_train_step(loss_fn, stateless(torch.optim.AdamW), config, policy="float16", max_norm=1.0)
        >>> state, metrics = step(step.init(), (torch.ones(8, 4), torch.zeros(8, 1)))
        >>> metrics.found_inf, state.step
        (tensor(0.), tensor(1))

    References:
        The loop of torch's automatic mixed precision examples, PyTorch 2.13: autocast, scale, backward, unscale_,
        clip_grad_norm_, step, update.
    """
    call = "make_train_step"
    check_function(call, loss_fn)
    check_optimizer(call, "optimizer", optimizer)
    check_nothing_is_clipped_last(call, optimizer)
    check_averages_are_found(call, optimizer)
    config = check_config(call, config)
    dtype = check_policy(call, policy)
    _check_clipping(call, max_norm, max_value)
    if ema_decay is not None:
        check_decay(call, "ema_decay", ema_decay)
    parallel = Parallel() if parallel is None else parallel
    if not isinstance(parallel, Parallel):
        raise TypeError(f"{call}: parallel must be a distributed.DataParallel; got {_tree.brief(parallel)}")
    if weight is not None and not callable(weight):
        raise TypeError(f"{call}: weight must be a function of a micro-batch; got {_tree.brief(weight)}")
    group_functions = group_functions_in(optimizer)
    if len(group_functions) > 1:
        raise ValueError(
            f"{call}: optimizer must group parameters by one function, by which they are stored; got by_group with "
            f"{len(group_functions)} different ones: give all of them the same group="
        )
    options = Options(
        policy=dtype,
        max_norm=max_norm,
        max_value=max_value,
        accumulate=integer(call, "accumulate", accumulate, 1),
        weight=weight,
        ema_decay=ema_decay,
        parallel=parallel,
        observe=_observers(call, observe),
    )
    if options.observe and options.parallel.shard:
        raise ValueError(f"{call}: observe must not be given with {parallel!r}; got {_tree.brief(options.observe)}")
    described_loss = loss_fn if isinstance(loss_fn, Loss) else loss(loss_fn)
    return TrainStep(described_loss, optimizer, config, options)


def _check_clipping(call: str, max_norm: object, max_value: object) -> None:
    """Raise TypeError or ValueError if a limit is not a positive number, or if both are given."""
    for name, limit in (("max_norm", max_norm), ("max_value", max_value)):
        if limit is not None:
            check_limit(call, name, limit)
    if max_norm is not None and max_value is not None:
        raise ValueError(f"{call}: max_norm and max_value must not both be given; got {max_norm} and {max_value}")


def _observers(call: str, observe: Mapping[str, Callable[[Tree], Tree]] | None) -> Mapping[str, Callable[[Tree], Tree]]:
    """Return the observe functions by name; raise TypeError if they are something else."""
    if observe is None:
        return {}
    if not isinstance(observe, Mapping) or not all(map(callable, observe.values())):
        raise TypeError(f"{call}: observe must be a dict of names to functions; got {_tree.brief(observe)}")
    return dict(observe)
