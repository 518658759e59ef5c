"""What a training step carries from call to call, what it reports, and how both are saved."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from funcamp import _tree
from funcamp._copies import Copies, refresh
from funcamp._flat import collapse, expand
from funcamp._state import ScalerState
from funcamp._types import Tree


class TrainState(NamedTuple):
    """All that a training step changes; immutable, a pytree of tensors. Made by a step's `init`."""

    step: Tensor
    """int64, shape (): calls so far, skipped ones too."""
    skipped: Tensor
    """int64, shape (): those of them that were skipped."""
    consecutive_skips: Tensor
    """int64, shape (): those since the last step that was applied."""
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
    """What a step reports: tensors, shape (), float32 but for the counts, which are int64, and aux."""

    loss: Tensor
    """The unscaled loss in the loss's dtype; its mean over micro-batches."""
    grad_norm: Tensor
    """The 2-norm of the unscaled gradients before clipping; infinite or NaN where the step was skipped."""
    scale: Tensor
    """The scale that multiplied this step's loss."""
    found_inf: Tensor
    """1.0 if this step was skipped."""
    exhausted: Tensor
    """1.0 if it was skipped and the scale cannot get lower (`funcamp.exhausted`)."""
    saturated: Tensor
    """1.0 if the scale should have grown and cannot (`funcamp.saturated`)."""
    applied: Tensor
    """Steps applied so far, this one included."""
    skipped: Tensor
    """Steps skipped so far, this one included."""
    consecutive_skips: Tensor
    """Steps skipped since the last one that was applied, this one included."""
    found_inf_by_leaf: Any
    """Bool, shape (leaves,): which parameters' gradients are not finite, in the order of `leaf_names`; `()` without
    that option."""
    records: Any
    """What taps counted, a `numerics.Record` by name, its backward pass scaled (`Record.unscale(metrics.scale)`); `{}`
    without probes."""
    aux: Any
    """What the loss returned beside itself, stacked over micro-batches; `()` without has_aux."""


def export(state: TrainState) -> dict[str, Tensor]:
    """Copies of every tensor under its dotted name."""
    tree = expand(_without_copies(state))
    pairs = zip(_tree.names(tree), _tree.leaves(tree))
    return {name: leaf.detach().clone() for name, leaf in pairs if leaf is not None}


def restore(saved: dict[str, Tensor], like: TrainState) -> TrainState:
    """The inverse of `export`, laid out and placed as like is."""
    if not isinstance(like, TrainState) or not isinstance(saved, dict):
        raise TypeError(f"load_state_dict: like must be a TrainState and saved a dict; got {like!r} and {saved!r}")
    stored = _without_copies(like)
    tree = expand(stored)
    leaves, spec = _tree.flatten(tree)
    names = [None if leaf is None else name for name, leaf in zip(_tree.names(tree), leaves)]
    odd = set(saved) ^ {name for name in names if name is not None}
    if odd:
        first = min(odd, key=str)
        kind = "has unknown" if first in saved else "lacks"
        raise ValueError(f"load_state_dict: saved must hold the names that state_dict gives; it {kind} {first!r}")
    new: list[Tensor | None] = []
    for name, leaf in zip(names, leaves):
        if name is None:
            new.append(None)
            continue
        value = saved[name]
        if not isinstance(value, Tensor) or value.shape != leaf.shape or value.dtype != leaf.dtype:
            raise ValueError(
                f"load_state_dict: saved[{name!r}] must be like {_tree.describe(leaf)}; got {_tree.describe(value)}"
            )
        new.append(value.detach().to(leaf.device, copy=True))
    state: TrainState = collapse(stored, _tree.unflatten(new, spec))
    return state._replace(copies=refresh(state.params, like.copies.plan))


def _without_copies(state: TrainState) -> TrainState:
    return state._replace(copies=Copies((), state.copies.plan))
