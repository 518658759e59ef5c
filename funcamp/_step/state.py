"""The training step's state and metrics."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._optim.chain import average_in
from funcamp._scaler.state import ScalerState
from funcamp._storage.params import Params
from funcamp._types import Tree


class TrainState(NamedTuple):
    """Everything that a training step changes; immutable, a pytree of tensors, created by a step's `init`."""

    step: Tensor
    """int64, shape (): calls so far, skipped ones too."""
    skipped: Tensor
    """int64, shape (): skipped calls so far."""
    consecutive_skips: Tensor
    """int64, shape (): calls skipped since the last applied step."""
    params: Params
    """The parameters in full precision."""
    opt_state: Tree
    """The optimizer's state; its count of applied steps excludes skipped ones. With an average a tuple of both."""
    scaler: ScalerState
    """The scaler's state."""
    buffers: dict[str, Tensor]
    """The module's buffers, which the loss reads and a step moves; empty if there are none."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Copy or pickle the state; raise TypeError for torch.save, whose files torch.load would refuse."""
        if operator.index(protocol) == torch.serialization.DEFAULT_PROTOCOL:  # copies and pickle have a later one
            raise TypeError(
                "torch.save: a TrainState must be saved by its tensors, which torch.load reads back; got the state "
                "itself: write funcamp.save(step.state_dict(state), path), or torch.save of that dict"
            )
        return object.__reduce_ex__(self, protocol)

    @property
    def ema(self) -> Tree:
        """The average of the parameters, of `ema_decay` or `average`, laid out as they are; `()` without one."""
        for part_state in states_of_parts(self.opt_state):
            average = average_in(part_state)
            if average is not None:
                return average.average
        return ()


class Metrics(NamedTuple):
    """Per-step metrics: scalar float32 tensors, except int64 counts, the loss in its dtype, and aux."""

    loss: Tensor
    """The unscaled loss in the loss's dtype; the mean over micro-batches, by their weight."""
    grad_norm: Tensor
    """The 2-norm of the unscaled gradients before clipping; infinite or NaN if one of them is not finite."""
    scale: Tensor
    """The scale that multiplied this step's loss."""
    lr: Tree
    """The learning rate of this step, float32: a dict by label for `by_group`, `()` for an optimizer without a rate.
    A skipped step did not use it."""
    found_inf: Tensor
    """1.0 if a gradient is not finite: the step was skipped, and the rule lowers the scale."""
    exhausted: Tensor
    """1.0 if a gradient is not finite and the scale cannot be lowered (`funcamp.exhausted`)."""
    saturated: Tensor
    """1.0 if the scale is due to grow and cannot (`funcamp.saturated`)."""
    applied: Tensor
    """int64: steps applied so far, including this one."""
    skipped: Tensor
    """int64: steps skipped so far, including this one."""
    consecutive_skips: Tensor
    """int64: steps skipped since the last applied one, including this one."""
    observed: dict[str, Tree]
    """The results of the `observe` functions, by name."""
    records: Mapping[str, Tree]
    """The counts of taps, as `numerics.Records`: a `numerics.Record` by name, whose backward counts are of scaled
    gradients (`Record.unscale(metrics.scale)`); `{}` without probes."""
    aux: Tree
    """The auxiliary outputs of the loss, stacked over micro-batches; `()` without has_aux."""

    def to_dict(self) -> dict[str, Tree]:
        """Return a dict for a logger: every metric by its name, entries of dicts as `lr/matrix`, `aux/hits`.

        Leaves out records and the metrics of options that are not set. The values are tensors; a `MetricReader` turns
        them into numbers. Of `{"a/b": ..., "a": {"b": ...}}` only the last is there. No sync.

        Example:
            >>> step = make_train_step(lambda p, x: (p["w"] * x).sum(), stateless(torch.optim.SGD, lr=0.5))
            >>> _, metrics = step(step.init({"w": torch.ones(2)}), torch.ones(2))
            >>> row = metrics.to_dict()
            >>> row["loss"], row["lr"], "aux" in row
            (tensor(2.), tensor(0.5000), False)
        """
        by_name: dict[str, Tree] = {}
        for field in self._fields:
            value = getattr(self, field)
            is_unset = isinstance(value, tuple) and not value
            if field != "records" and not is_unset:
                by_name |= dict(_entries(field, value))
        return by_name


def _entries(name: str, value: Tree) -> Iterator[tuple[str, Tree]]:
    """Yield the entries of nested dicts, each with its path as a name; another value as it is."""
    if not isinstance(value, dict):
        yield name, value
        return
    for key, item in value.items():
        yield from _entries(f"{name}/{key}", item)


def check_train_state(call: str, name: str, value: object) -> TrainState:
    """Return the value if it is a state with stored parameters; raise TypeError otherwise."""
    if not isinstance(value, TrainState):
        raise TypeError(f"{call}: {name} must be a TrainState, as init makes it; got {_tree.brief(value)}")
    if not isinstance(value.params, Params):
        raise TypeError(
            f"{call}: {name}.params must be Params, as init makes them; got {_tree.brief(value.params)}: store a tree "
            "like those of before, params=state.params.ravel(tree)"
        )
    return value


def states_of_parts(opt_state: Tree) -> tuple[Tree, ...]:
    """Return the states of the parts of a chain; none if only one has a state, which is then the chain's."""
    return opt_state if type(opt_state) is tuple else ()
