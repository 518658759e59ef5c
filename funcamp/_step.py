"""The training step: scale, differentiate, judge, clip, step, skip and update as one pure function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._clip import check_limit
from funcamp._copies import Copies, clone, for_loss, gather, refresh, store
from funcamp._ema import check_decay, ema_update
from funcamp._flat import collapse, expand, matrix_or_vector
from funcamp._fold import judge, unscale_and_clip
from funcamp._grad import differentiate
from funcamp._groups import GroupedOptimizer, check_optimizer
from funcamp._policy import Policy, check_policy
from funcamp._state import ScalerConfig, ScalerState, check_config, init
from funcamp._types import Reduce, Tree
from funcamp._update import skip_step, update
from funcamp._window import accumulate as accumulate_window

_NO_POLICY = Policy(torch.float32)


class TrainState(NamedTuple):
    """All that a training step changes; immutable, a pytree of tensors. Made by a step's `init`."""

    step: Tensor
    """int64, shape (): calls so far, skipped ones too."""
    params: Tree
    """The parameters in full precision: a `FlatParams`, or a plain tree where flat=False."""
    opt_state: Any
    """The optimizer's state; its count of applied steps leaves out skipped ones."""
    scaler: ScalerState
    """The scaler's state."""
    buffers: dict[str, Tensor]
    """The module's buffers; empty where there are none."""
    copies: Copies
    """The compute copies of the parameters that the policy chose."""
    ema: Tree
    """The average of the parameters, laid out as they are; `()` without ema_decay."""


class Metrics(NamedTuple):
    """What a step reports: tensors, shape (), float32, but aux."""

    loss: Tensor
    """The unscaled loss in the loss's dtype; its mean over micro-batches."""
    grad_norm: Tensor
    """The 2-norm of the unscaled gradients before clipping; infinite or NaN where the step was skipped."""
    scale: Tensor
    """The scale that multiplied this step's loss."""
    found_inf: Tensor
    """1.0 if this step was skipped."""
    aux: Any
    """What the loss returned beside itself, stacked over micro-batches; `()` without has_aux."""


class TrainStep:
    """A pure step `(state, batch) -> (state, metrics)`; made by `make_train_step`."""

    def __init__(self, loss_fn: Callable[..., Any], optimizer: Any, config: ScalerConfig, options: _Options) -> None:
        self.loss_fn, self.optimizer, self.config, self._options = loss_fn, optimizer, config, options

    def __repr__(self) -> str:
        return f"make_train_step({self.loss_fn!r}, {self.optimizer!r}, policy={self._options.policy})"

    def init(self, params: Tree = None, buffers: dict[str, Tensor] | None = None) -> TrainState:
        """Make the state before the first step.

        Copies every value: the state shares nothing with params or a module. The scaler's state lies on the device of
        the first parameter. No sync.

        Args:
            params: a pytree of floating-point or complex tensors, or a `FlatParams`; by default the module's, for a
                loss of `module_loss`.
            buffers: tensors by name; by default the module's.

        Raises:
            TypeError: params is missing, or a leaf is an integer or sparse tensor or no tensor; buffers is no dict of
                tensors.
            ValueError: params has no tensor, or not the names of the module.

        Example:
            >>> step = make_train_step(lambda p, x: (p["w"] * x).sum(), stateless(torch.optim.SGD))
            >>> state = step.init({"w": torch.ones(2)})
            >>> state.step, state.params.tree()
            (tensor(0), {'w': tensor([1., 1.])})
        """
        options, call = self._options, "init"
        if params is None:
            if not hasattr(self.loss_fn, "params"):
                raise TypeError("init: params must be given, for the loss was not made by module_loss; got None")
            params = self.loss_fn.params()
        if buffers is None:
            buffers = self.loss_fn.buffers() if hasattr(self.loss_fn, "buffers") else {}
        if not isinstance(buffers, dict) or not all(isinstance(value, Tensor) for value in buffers.values()):
            raise TypeError(f"init: buffers must be a dict of tensors; got {buffers!r}")
        stored, copies = store(call, params, options.policy, self.loss_fn, options.group if options.flat else None)
        device = next((leaf.device for leaf in _tree.leaves(stored) if leaf is not None), None)
        if device is None:
            raise ValueError(f"init: params must hold a tensor; got {params!r}")
        return TrainState(
            step=torch.zeros((), dtype=torch.int64, device=device),
            params=clone(stored),
            opt_state=self.optimizer.init(stored),
            scaler=init(self.config, device=device),
            buffers=clone(buffers),
            copies=copies,
            ema=() if options.ema_decay is None else clone(stored),
        )

    def loss(self, state: TrainState, batch: Any) -> Any:
        """What the loss function returns for a batch, in the precision of the step, without a gradient.

        For validation between steps: put the module in eval mode before. With buffers the pair (loss, buffers). No
        sync.

        Example:
            >>> step = make_train_step(lambda p, x: (p["w"] * x).sum(), stateless(torch.optim.SGD))
            >>> step.loss(step.init({"w": torch.ones(2)}), torch.tensor([1.0, 2.0]))
            tensor(3.)
        """
        with torch.no_grad():
            inputs, build = for_loss(state.params, state.copies)
            return self._call(build(inputs), state.buffers, batch)

    def state_dict(self, state: TrainState) -> dict[str, Tensor]:
        """Every tensor of a state under a dotted name, for torch.save: `params.` and the module's own names, and so on.

        The same names whether the parameters are flat or not; compute copies are left out, for they follow from the
        parameters. Tensors are copies. No sync.

        Example:
            >>> step = make_train_step(lambda p, x: (p["w"] * x).sum(), stateless(torch.optim.SGD))
            >>> list(step.state_dict(step.init({"w": torch.ones(2)})))[:3]
            ['step', 'params.w', 'opt_state.applied']
        """
        tree = expand(_without_copies(state))
        pairs = zip(_tree.names(tree), _tree.leaves(tree))
        return {name: leaf.detach().clone() for name, leaf in pairs if leaf is not None}

    def load_state_dict(self, saved: dict[str, Tensor], like: TrainState) -> TrainState:
        """The state that `state_dict` gave, laid out as `like` (from `init`) is, on its devices. No sync.

        Raises:
            TypeError: like is no `TrainState`, or saved no dict.
            ValueError: a name is missing or unknown, or a tensor has another shape or dtype than like's.

        Example:
            >>> step = make_train_step(lambda p, x: (p["w"] * x).sum(), stateless(torch.optim.SGD))
            >>> state = step.init({"w": torch.ones(2)})
            >>> saved = step.state_dict(state)
            >>> step.load_state_dict(saved, like=state).params.tree()
            {'w': tensor([1., 1.])}
        """
        if not isinstance(like, TrainState) or not isinstance(saved, dict):
            raise TypeError(f"load_state_dict: like must be a TrainState and saved a dict; got {like!r} and {saved!r}")
        stored = _without_copies(like)
        tree = expand(stored)
        leaves, spec = _tree.flatten(tree)
        names = [None if leaf is None else name for name, leaf in zip(_tree.names(tree), leaves)]
        odd = sorted(set(saved) ^ {name for name in names if name is not None})
        if odd:
            kind = "lacks" if odd[0] not in saved else "has unknown"
            raise ValueError(f"load_state_dict: saved must hold the names that state_dict gives; it {kind} {odd[0]!r}")
        new = []
        for name, leaf in zip(names, leaves):
            value = None if name is None else saved[name]
            if value is not None and (value.shape != leaf.shape or value.dtype != leaf.dtype):
                raise ValueError(
                    f"load_state_dict: saved[{name!r}] must be like {_tree.describe(leaf)}; got {_tree.describe(value)}"
                )
            new.append(None if value is None else value.detach().to(leaf.device, copy=True))
        state: TrainState = collapse(stored, _tree.unflatten(new, spec))
        return state._replace(copies=refresh(state.params, like.copies.plan))

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Take one step. Pure; safe under torch.compile(fullgraph=True); no sync.

        Args:
            state: from `init` or the last call.
            batch: a pytree, passed to the loss; with accumulate > 1 every tensor in it has micro-batches along its
                first dimension, accumulate of them, or fewer in a last, partial window.

        Raises:
            TypeError: state is no `TrainState`; the loss is no floating-point tensor, or returns something else than
                the options say.
            ValueError: the loss has a shape other than (); micro-batches are more than accumulate, none, or differ in
                number.
        """
        if not isinstance(state, TrainState):
            raise TypeError(f"step: state must be a TrainState, as init makes it; got {state!r}")
        options = self._options

        def one(buffers: dict[str, Tensor], piece: Any, parts: int) -> tuple[Tree, Tensor, dict[str, Tensor], Any]:
            return self._gradients(state, buffers, piece, parts)

        if options.accumulate == 1:
            grads, loss, buffers, aux = one(state.buffers, batch, 1)
        else:
            grads, loss, buffers, aux = accumulate_window(
                one, state.params, state.buffers, batch, options.accumulate, scan=options.scan
            )
        scaler, norm = judge(state.scaler, grads, options.reduce)
        grads = unscale_and_clip(state.scaler, grads, norm, options.max_norm, options.max_value)
        new = self.optimizer.update(state.params, grads, state.opt_state)
        params, opt_state = skip_step(scaler, new=new, old=(state.params, state.opt_state))
        ema = state.ema
        if options.ema_decay is not None:
            ema = skip_step(scaler, new=ema_update(ema, params, options.ema_decay), old=ema)
        if not options.keep_buffers:
            buffers = skip_step(scaler, new=buffers, old=state.buffers)
        after = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            scaler=update(scaler, self.config),
            buffers=buffers,
            copies=refresh(params, state.copies.plan),
            ema=ema,
        )
        return after, Metrics(loss, norm.float(), state.scaler.scale.clone(), scaler.found_inf, aux)

    def _call(self, tree: Tree, buffers: dict[str, Tensor], batch: Any) -> Any:
        policy = self._options.policy
        region: Any = contextlib.nullcontext()
        if policy.autocast and policy.compute_dtype != torch.float32:
            device = next(leaf.device.type for leaf in _tree.leaves(tree) if leaf is not None)
            if device != "meta":  # no values, no autocast
                region = torch.autocast(device, policy.compute_dtype)
        with region:
            return self.loss_fn(tree, buffers, batch) if self._options.has_buffers else self.loss_fn(tree, batch)

    def _gradients(
        self, state: TrainState, buffers: dict[str, Tensor], batch: Any, parts: int
    ) -> tuple[Tree, Tensor, dict[str, Tensor], Any]:
        """Scaled gradients as a tree like the stored parameters, the loss, the buffers after it, aux."""
        inputs, build = for_loss(state.params, state.copies)
        beside = self._options.has_buffers or self._options.has_aux

        def loss_of(values: list[Tensor]) -> Any:
            return self._call(build(values), buffers, batch)

        grads, loss, aux = differentiate("step", state.scaler, loss_of, inputs, has_aux=beside, parts=parts)
        after = buffers
        if self._options.has_buffers:
            after, aux = aux if self._options.has_aux else (aux, ())
        return gather(state.params, state.copies, grads), loss, after, aux


def _without_copies(state: TrainState) -> TrainState:
    return state._replace(copies=Copies((), state.copies.plan))


class _Options(NamedTuple):
    policy: Policy
    max_norm: float | Tensor | None
    max_value: float | Tensor | None
    accumulate: int
    scan: bool
    reduce: Reduce | None
    ema_decay: float | None
    has_aux: bool
    has_buffers: bool
    keep_buffers: bool
    flat: bool
    group: Callable[[str, Tensor], str]


def make_train_step(
    loss_fn: Callable[..., Any],
    optimizer: Any,
    config: ScalerConfig = ScalerConfig(),
    *,
    policy: Policy | str | None = None,
    max_norm: float | Tensor | None = None,
    max_value: float | Tensor | None = None,
    accumulate: int = 1,
    scan: bool = False,
    reduce: Reduce | None = None,
    ema_decay: float | None = None,
    has_aux: bool = False,
    has_buffers: bool | None = None,
    keep_buffers: bool = False,
    flat: bool = True,
    group: Callable[[str, Tensor], str] | None = None,
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
        optimizer: what `stateless` or `by_group` makes, or any object with such an init and update.
        config: the scaler's configuration.
        policy: a `Policy` or its string: autocast and compute copies. None: the loss sees the parameters as they are,
            and autocast is its own affair.
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
        flat: hold the parameters in a `FlatParams`, so that launches do not grow with the number of tensors.
        group: the groups of flat storage, as in `ravel`; by default those of the optimizer, or matrices and vectors.

    Returns:
        A `TrainStep`: call it as `(state, batch) -> (state, metrics)`; its `init` makes the first `TrainState`, its
        `loss` evaluates. Metrics are `Metrics`.

    Raises:
        TypeError: an argument is of another kind than said above.
        ValueError: a number is out of range, or both max_norm and max_value are given.

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
        raise TypeError(f"{call}: loss_fn must be callable; got {loss_fn!r}")
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
    if group is None:
        group = optimizer.group if isinstance(optimizer, GroupedOptimizer) else matrix_or_vector
    options = _Options(
        policy=checked or _NO_POLICY,
        max_norm=max_norm,
        max_value=max_value,
        accumulate=accumulate,
        scan=bool(scan),
        reduce=reduce,
        ema_decay=ema_decay,
        has_aux=bool(has_aux),
        has_buffers=bool(getattr(loss_fn, "has_buffers", False) if has_buffers is None else has_buffers),
        keep_buffers=bool(keep_buffers),
        flat=bool(flat),
        group=group,
    )
    return TrainStep(loss_fn, optimizer, config, options)
