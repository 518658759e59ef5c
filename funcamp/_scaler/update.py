"""The initial state, the scale's update, the skipped step, and a scale at its limit."""

from __future__ import annotations

import torch
from torch import Tensor

from funcamp import _tree, _upstream
from funcamp._check import real
from funcamp._scaler.config import ScalerConfig, check_config
from funcamp._scaler.rule import Outcome
from funcamp._scaler.state import ScalerState, check_state, counters_of, replace, tensors_of, with_counters
from funcamp._types import Tree


def init(config: ScalerConfig = ScalerConfig(), *, device: torch.device | str | None = None) -> ScalerState:
    """Make the state before the first step.

    scale = init_scale, growth_tracker = 0, found_inf = 0. All tensors are created at once. Pure; no sync.

    Args:
        config: the configuration; pass the same one to `update`.
        device: the state's device, that of the gradients. None for torch's default device.

    Returns:
        A `ScalerState`; if the rule counts more, a state with a dict of `counters` as a fourth field.

    Raises:
        TypeError: config is not a `ScalerConfig`.

    Example:
        >>> init(ScalerConfig(init_scale=8.0)).scale
        tensor(8.)

    References:
        `GradScaler._lazy_init_scale_growth_tracker`, torch/amp/grad_scaler.py, PyTorch 2.13.
    """
    config = check_config("init", config)
    state = ScalerState(
        scale=torch.full((), config.init_scale, dtype=torch.float32, device=device),
        growth_tracker=torch.zeros((), dtype=torch.int32, device=device),
        found_inf=torch.zeros((), dtype=torch.float32, device=device),
    )
    return with_counters(state, tensors_of(config.rule.first_counters(), device))


def update(
    state: ScalerState, config: ScalerConfig = ScalerConfig(), *, new_scale: float | Tensor | None = None
) -> ScalerState:
    """Move the scale by the configuration's rule and clear `found_inf`.

    The default rule is torch's, bit for bit. Factors are applied in float64 and rounded once to float32. Any nonzero
    flag, also NaN, counts as found. The scale does not grow to infinity:

        found_inf > 0:   scale <- f32(f64(scale) * backoff_factor);  growth_tracker <- 0
        otherwise:       growth_tracker <- growth_tracker + 1
                         if growth_tracker == growth_interval:
                             grown <- f32(f64(scale) * growth_factor)
                             scale <- grown if grown is finite else scale;  growth_tracker <- 0
        then, if set:    clamp scale to [min_scale, max_scale]

    Pure; safe under torch.compile and vmap; no sync.

    Args:
        state: the state after `unscale_and_check`.
        config: the configuration the state was made with.
        new_scale: sets the scale instead of the rule and keeps the tracker, as in torch; a positive Python number, or a
            float32 tensor of one element, whose value is not checked. The configuration's bounds still apply.

    Returns:
        The next state, with `found_inf` 0.

    Raises:
        TypeError: config is not a `ScalerConfig`; new_scale is neither a number nor a float32 tensor.
        ValueError: new_scale is a number that is not positive and finite, or a tensor that has several elements,
            requires grad, or is on another type of device.

    Example:
        >>> config = ScalerConfig(init_scale=8.0)
        >>> _, state = unscale_and_check(init(config), torch.tensor(float("nan")))
        >>> update(state, config).scale
        tensor(4.)

    References:
        `_amp_update_scale_`, aten/src/ATen/native/cuda/AmpKernels.cu, and `GradScaler.update`,
        torch/amp/grad_scaler.py, PyTorch 2.13.
    """
    state, config = check_state_and_config("update", state, config)
    found_inf = torch.zeros_like(state.found_inf)
    if new_scale is not None:
        scale = _bounded(_new_scale(state, new_scale), config)
        return replace(state, scale=scale, found_inf=found_inf)
    outcome = _outcome("update", state, config)
    return replace(
        state,
        scale=_bounded(outcome.scale, config),
        growth_tracker=outcome.growth_tracker,
        found_inf=found_inf,
        counters=outcome.counters,  # ignored by a state without
    )


def merge(*states: ScalerState) -> ScalerState:
    """Combine the flags of states that share a scale: optimizers that skip independently, one update.

    found_inf = 1 if any state's found_inf != 0, else 0. The other fields come from the first state. The caller must
    guarantee that all states have the same scale; checking would synchronize. If their scales differ (a scaler per
    loss), use the result only for `skip_step`. Pure; safe under torch.compile and vmap; no sync.

    Args:
        *states: one state or more, all unscaled and checked from the same one.

    Returns:
        The state for `update`.

    Raises:
        TypeError: no state is given, or one is not a scaler state, or they have different types.

    Example:
        >>> state = init()
        >>> _, generator = unscale_and_check(state, torch.tensor(float("inf")))
        >>> _, critic = unscale_and_check(state, torch.tensor(1.0))
        >>> merge(generator, critic).found_inf
        tensor(1.)

    References:
        `GradScaler.update` sums the flags of its optimizers, torch/amp/grad_scaler.py, PyTorch 2.13.
    """
    if not states:
        raise TypeError("merge: states must be one scaler state or more; got none")
    first = check_state("merge", states[0])
    is_found = first.found_inf != 0
    for other in states[1:]:
        if type(other) is not type(first):
            raise TypeError(f"merge: states must be of one type; got {type(first).__name__} and {other!r}")
        is_found_in_other = check_state("merge", other).found_inf != 0
        is_found = is_found | is_found_in_other.to(is_found.device)
    return replace(first, found_inf=is_found.float())


def skip_step(state: ScalerState, *, new: Tree, old: Tree) -> Tree:
    """Select, leaf by leaf, the old value if a non-finite gradient was found and the new one otherwise.

    leaf = old if found_inf != 0 else new; a leaf that is the same object in both is returned as it is. Both trees are
    computed; there is no branch. A leaf requires a gradient only
    if its new value does: not after an optimizer's update, also if the old value is a module's parameter. Pure; safe
    under torch.compile and vmap; no sync.

    Args:
        state: the state after `unscale_and_check`, before `update`.
        new: a pytree after the step: parameters, optimizer state, anything the step changed.
        old: the same pytree before the step.

    Returns:
        The selected pytree. None and equal Python values pass through.

    Raises:
        ValueError: new and old differ in structure, or two leaves differ in shape, dtype or device.
        TypeError: a leaf is a sparse tensor, or a Python value that differs between new and old.

    Example:
        >>> _, state = unscale_and_check(init(), torch.tensor(float("inf")))
        >>> skip_step(state, new={"w": torch.ones(2)}, old={"w": torch.zeros(2)})
        {'w': tensor([0., 0.])}
    """
    state = check_state("skip_step", state)
    _tree.same_structure("skip_step", ("new", "old"), (new, old))
    flat_new, spec = _tree.flatten(new)
    skips = state.found_inf != 0
    selected = []
    for index, (new_leaf, old_leaf) in enumerate(zip(flat_new, _tree.leaves(old))):
        selected.append(_select(new, index, skips, new_leaf, old_leaf))
    return _tree.unflatten(selected, spec)


def exhausted(state: ScalerState, config: ScalerConfig = ScalerConfig()) -> Tensor:
    """Return whether a gradient is non-finite and the rule would lower the scale but cannot.

    exhausted = the rule backs off, and the scale after its bounds is not lower, or is 0. Then the loss overflows at any
    scale: the model diverged, or it needs another precision. Pure; safe under torch.compile and vmap; no sync.

    Args:
        state: the state after `unscale_and_check`, before `update`.
        config: the configuration the state was made with.

    Returns:
        A bool tensor, shape (). Never True for a static scale.

    Raises:
        TypeError: config is not a `ScalerConfig`, or state is not a state of its rule.

    Example:
        >>> config = ScalerConfig(init_scale=1.0, min_scale=1.0)
        >>> _, state = unscale_and_check(init(config), torch.tensor(float("inf")))
        >>> exhausted(state, config)
        tensor(True)

    References:
        DeepSpeed and fairseq raise here: deepspeed/runtime/fp16/loss_scaler.py, fairseq/optim/dynamic_loss_scaler.py.
    """
    state, config = check_state_and_config("exhausted", state, config)
    outcome = _outcome("exhausted", state, config)
    next_scale = _bounded(outcome.scale, config)
    return outcome.backs_off & (~(next_scale < state.scale) | (next_scale == 0))


def saturated(state: ScalerState, config: ScalerConfig = ScalerConfig()) -> Tensor:
    """Return whether the scale is due to grow but cannot.

    saturated = the rule grows, and the scale after its bounds is not higher, or is infinite. Then gradients do not
    overflow even at the largest scale. Pure; safe under torch.compile and vmap; no sync.

    Args:
        state: the state after `unscale_and_check`, before `update`.
        config: the configuration the state was made with.

    Returns:
        A bool tensor, shape (). Never True for a static scale.

    Raises:
        TypeError: config is not a `ScalerConfig`, or state is not a state of its rule.

    Example:
        >>> config = ScalerConfig(init_scale=8.0, max_scale=8.0, growth_interval=1)
        >>> saturated(init(config), config)
        tensor(True)

    References:
        `_amp_update_scale_` keeps a scale that would be infinite: native/cuda/AmpKernels.cu, PyTorch 2.13.
    """
    state, config = check_state_and_config("saturated", state, config)
    outcome = _outcome("saturated", state, config)
    next_scale = _bounded(outcome.scale, config)
    return outcome.grows & (~(next_scale > state.scale) | torch.isinf(next_scale))


def check_state_and_config(call: str, state: ScalerState, config: ScalerConfig) -> tuple[ScalerState, ScalerConfig]:
    """Check that a state and a configuration belong together, and return both.

    Raises:
        TypeError: one has another type, or the state lacks the counters of the configuration's rule.
        ValueError: a field of the state has a shape other than ().
    """
    state, config = check_state(call, state), check_config(call, config)
    rules_counters = sorted(config.rule.first_counters())
    states_counters = sorted(counters_of(state))
    if rules_counters != states_counters:
        raise TypeError(
            f"{call}: state must count {', '.join(rules_counters) or 'clean steps only'}, as init makes it for the "
            f"rule {config.rule.name}; got one that counts {', '.join(states_counters) or 'clean steps only'} (config "
            "must be the one that the state was made with)"
        )
    return state, config


def _outcome(call: str, state: ScalerState, config: ScalerConfig) -> Outcome:
    """Return the outcome of the configuration's rule for one step.

    Raises:
        ValueError: the rule does not return the counters that it starts with.
    """
    outcome = config.rule.outcome(state, config)
    if outcome.counters.keys() != counters_of(state).keys():
        raise ValueError(
            f"{call}: the outcome of the rule {config.rule.name} must have the counters of its first_counters, "
            f"{', '.join(counters_of(state)) or 'none'}; got {', '.join(outcome.counters) or 'none'}"
        )
    return outcome


def _bounded(scale: Tensor, config: ScalerConfig) -> Tensor:
    """Return the scale clamped to [min_scale, max_scale]."""
    return scale.clamp(config.min_scale, config.max_scale) if config.has_bounds else scale


def _select(tree: Tree, index: int, skips: Tensor, new: object, old: object) -> object:
    """Return the old leaf if the step is skipped and the new one otherwise.

    Args:
        tree: the new tree, for messages.
        index: the leaf's position in it.
        skips: bool, shape ().
        new: the leaf after the step.
        old: the leaf before the step.

    Raises:
        TypeError, ValueError: as in `skip_step`.
    """
    if new is old:
        return new
    if not isinstance(new, Tensor) or not isinstance(old, Tensor):
        if isinstance(new, Tensor) or isinstance(old, Tensor) or new != old:
            raise TypeError(
                f"skip_step: new{_tree.path_of(tree, index)} must be a tensor in both trees, or an equal value; "
                f"got {_tree.describe(new)} against {_tree.describe(old)} in old"
            )
        return new
    if new.shape != old.shape or new.dtype != old.dtype or new.device != old.device:
        raise ValueError(
            f"skip_step: new{_tree.path_of(tree, index)} must have the shape, dtype and device of old; "
            f"got {_tree.describe(new)} against {_tree.describe(old)}"
        )
    if new.layout != torch.strided or old.layout != torch.strided:
        raise TypeError(f"skip_step: new{_tree.path_of(tree, index)} must be strided; got layout {new.layout}")
    _tree.check_device("skip_step", "new", tree, index, new, skips.device)
    if old.requires_grad and not new.requires_grad and not _upstream.transforms_active():
        old = old.detach()  # else the graph would grow with the steps
    return torch.where(skips.to(new.device, non_blocking=True), old, new)


def _new_scale(state: ScalerState, value: object) -> Tensor:
    """Return the scale that the caller of `update` sets, checked."""
    if isinstance(value, Tensor):
        if value.dtype != torch.float32:
            raise TypeError(f"update: new_scale must be a float32 tensor or a number; got {value.dtype}")
        if value.numel() != 1 or value.requires_grad or value.device.type != state.scale.device.type:
            raise ValueError(
                "update: new_scale must have one element, not require grad, and lie on the state's type of device; "
                f"got {_tree.describe(value)}, requires_grad={value.requires_grad}"
            )
        return value.reshape(()).to(state.scale.device, non_blocking=True)
    number = real("update", "new_scale", value, "a float32 tensor or a number")
    if not 0.0 < number <= torch.finfo(torch.float32).max:
        raise ValueError(f"update: new_scale must be positive and finite in float32; got {value}")
    return torch.full_like(state.scale, number)
