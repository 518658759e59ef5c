"""`make_train_step`: the options of a training step, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from funcamp import _tree
from funcamp._autograd.loss import ModuleLoss
from funcamp._autograd.scaled_grad import Engine, check_engine
from funcamp._optim.by_group import GroupedOptimizer, check_optimizer
from funcamp._optim.clip import check_limit
from funcamp._optim.ema import check_decay
from funcamp._scaler.config import ScalerConfig, check_config
from funcamp._step.accumulate import can_scan
from funcamp._step.data_parallel import Alone
from funcamp._step.options import Options
from funcamp._step.step import TrainStep
from funcamp._storage.flat import matrix_or_vector
from funcamp._storage.policy import Policy, check_policy
from funcamp._types import Reduce

_NO_POLICY = Policy(torch.float32)


def make_train_step(
    loss_fn: Callable[..., Any],
    optimizer: Any,
    config: ScalerConfig = ScalerConfig(),
    *,
    policy: Policy | str | torch.dtype | None = None,
    max_norm: float | Tensor | None = None,
    max_value: float | Tensor | None = None,
    accumulate: int = 1,
    scan: bool = False,
    reduce: Reduce | None = None,
    ema_decay: float | None = None,
    has_aux: bool = False,
    has_buffers: bool | None = None,
    keep_buffers: bool = False,
    has_scaler: bool = False,
    engine: Engine | None = None,
    found_inf_by_leaf: bool = False,
    probes: Iterable[str] | None = None,
    flat: bool = True,
    group: Callable[[str, Tensor], str] | None = None,
    parallel: Alone | None = None,
) -> TrainStep:
    """Build a pure training step from a loss function and an optimizer.

    One call scales the loss, differentiates it, finds non-finite gradients and their norm in one reading, unscales and
    clips inside the optimizer's arithmetic, and moves the scale. A step with a non-finite gradient changes nothing but
    the scale and the count of calls: parameters, moments, schedule, average, copies and buffers are bit for bit what
    they were. Nothing syncs. Compile it whole: `torch.compile(step, fullgraph=True)`.

    Args:
        loss_fn: `(params, batch) -> loss`, any function of a pytree of parameters and a batch; `module_loss` makes one
            of a module. With has_buffers `(params, buffers, batch) -> (loss, buffers)`. Dropout draws from torch's
            default generator: `torch.manual_seed` makes a run reproducible, saving `torch.get_rng_state` resumes it.
        optimizer: what `stateless` or `by_group` makes, or any object with such an init and update; with a
            `learning_rate(opt_state)` too the metrics have its rate.
        config: the scaler's configuration.
        policy: a `Policy`, its string ("float16", "bf16", "16-mixed") or a dtype: autocast and compute copies. None:
            the loss sees the parameters as they are, and autocast is its own affair.
        max_norm: clip gradients to this global 2-norm; a positive number or a tensor of shape ().
        max_value: clamp gradients to this magnitude; not with max_norm.
        accumulate: micro-batches in a step: their gradients of loss / count are summed in the parameters' dtype, under
            one scale, one check and one update.
        scan: compile the micro-batch once, by torch's scan, instead of accumulate times; eager it plays no part.
        reduce: a pure function on the flag, as in `unscale_and_check`.
        ema_decay: keep an average of the parameters with this decay in `TrainState.ema`.
        has_aux: loss_fn returns `(loss, aux)`, or `(loss, (buffers, aux))`; aux is a pytree of tensors.
        has_buffers: whether loss_fn takes and returns buffers; by default what `module_loss` found.
        keep_buffers: keep what the forward pass of a skipped step wrote in buffers (BatchNorm's running statistics), as
            torch's loop does, where it may be non-finite; by default they go back with the rest.
        has_scaler: loss_fn takes the `ScalerState` before the batch, to scale gradients of its own: a gradient
            penalty's, an inner loop's. Give it to `scaled_grad_and_value`, or to `scale` and `unscale`.
        engine: "autograd", "func" or None, as in `scaled_grad_and_value`: torch's autograd, unless the step runs inside
            a transform of torch.func, or a tensor of the state requires a gradient. Tensors of the batch may require
            one, for a penalty on it in the loss; "func" makes what comes out differentiable with respect to them.
        found_inf_by_leaf: tell in the metrics which parameters' gradients are not finite, in the order of
            `leaf_names(state.params)`. Reads the gradients once more.
        probes: names of tensors that the loss taps: it then takes a dict of `numerics.Record` by these names after
            params, for `numerics.tap`, and the metrics have what was counted; by default those of a loss that
            `numerics.track_scales` made.
        flat: hold the parameters in a `FlatParams`, so that launches do not grow with the number of tensors.
        group: the groups of flat storage, as in `ravel`; by default those of the optimizer, or matrices and vectors.
        parallel: a `distributed.DataParallel`: every rank takes its batch, and the step is one of all.

    Returns:
        A `TrainStep`: call it as `(state, batch) -> (state, metrics)`; its `init` makes the first `TrainState`, its
        `loss` evaluates. Metrics are `Metrics`.

    Raises:
        TypeError: an argument is of another kind than said above, or has_scaler is set for a loss of `module_loss`.
        ValueError: a number is out of range, engine is another word, or both max_norm and max_value are given.

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
    if not callable(loss_fn):
        raise TypeError(f"{call}: loss_fn must be callable; got {_tree.brief(loss_fn)}")
    if isinstance(loss_fn, nn.Module):
        raise TypeError(
            f"{call}: loss_fn must be a function of parameters and batch: write module_loss(model, criterion), or "
            f"module_loss(model) if the model returns its loss; got the module {type(loss_fn).__name__} itself"
        )
    check_optimizer(call, "optimizer", optimizer)
    config = check_config(call, config)
    checked = check_policy(call, policy)
    for name, limit in (("max_norm", max_norm), ("max_value", max_value)):
        if limit is not None:
            check_limit(call, name, limit)
    if max_norm is not None and max_value is not None:
        raise ValueError(f"{call}: max_norm and max_value must not both be given; got {max_norm} and {max_value}")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int):
        raise TypeError(f"{call}: accumulate must be an integer; got {accumulate!r}")
    if accumulate < 1:
        raise ValueError(f"{call}: accumulate must be 1 or more; got {accumulate}")
    if ema_decay is not None:
        check_decay(call, "ema_decay", ema_decay)
    for name, function in (("reduce", reduce), ("group", group)):
        if function is not None and not callable(function):
            raise TypeError(f"{call}: {name} must be callable; got {function!r}")
    found = getattr(loss_fn, "has_buffers", None)
    if found is not None and has_buffers is not None and has_buffers != found:
        raise ValueError(f"{call}: has_buffers must be {found}, as module_loss found it; got {has_buffers}")
    if has_scaler and isinstance(loss_fn, ModuleLoss):
        raise TypeError(f"{call}: loss_fn must take the scaler's state with has_scaler=True; got {loss_fn!r}")
    if group is None:
        group = optimizer.group if isinstance(optimizer, GroupedOptimizer) else matrix_or_vector
    options = Options(
        policy=checked or _NO_POLICY,
        max_norm=max_norm,
        max_value=max_value,
        accumulate=accumulate,
        scan=bool(scan) and can_scan(),
        reduce=reduce,
        ema_decay=ema_decay,
        has_aux=bool(has_aux),
        has_buffers=bool(found if has_buffers is None else has_buffers),
        keep_buffers=bool(keep_buffers),
        has_scaler=bool(has_scaler),
        engine=check_engine(call, engine),
        found_inf_by_leaf=bool(found_inf_by_leaf),
        probes=_probe_names(call, loss_fn, probes),
        flat=bool(flat),
        group=group,
        parallel=_check_parallel(call, parallel, flat=bool(flat), by_leaf=bool(found_inf_by_leaf)),
    )
    return TrainStep(loss_fn, optimizer, config, options)


def _check_parallel(call: str, parallel: Alone | None, *, flat: bool, by_leaf: bool) -> Alone:
    if parallel is None:
        return Alone()
    if not isinstance(parallel, Alone):
        raise TypeError(f"{call}: parallel must be a distributed.DataParallel; got {parallel!r}")
    if parallel.shard and not flat:
        raise ValueError(f"{call}: flat must be True with {parallel!r}; got False")
    if parallel.shard and by_leaf:
        raise ValueError(f"{call}: found_inf_by_leaf must be False with {parallel!r}; got True")
    return parallel


def _probe_names(call: str, loss_fn: Any, probes: Iterable[str] | None) -> tuple[str, ...]:
    found = getattr(loss_fn, "probe_names", None)
    if probes is None:
        return found or ()
    names = (probes,) if isinstance(probes, str) else tuple(probes)
    if found is not None and names != found:
        raise ValueError(f"{call}: probes must be those of track_scales, or left out; got {names}")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{call}: probes must be names; got {name!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"{call}: probes must differ; got {names}")
    if found is None and isinstance(loss_fn, ModuleLoss):
        raise TypeError(f"{call}: loss_fn must take probes: numerics.track_scales makes such a loss; got {loss_fn!r}")
    return names
