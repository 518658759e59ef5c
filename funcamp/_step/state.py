"""The training step's state and metrics, and how a state is saved and loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._optim.chain import Average, Every, is_average
from funcamp._optim.stateless import OptState
from funcamp._scaler.state import ScalerState
from funcamp._storage.params import Params, clone, collapse, expand
from funcamp._types import Tree


class Variables(NamedTuple):
    """What the loss reads and a step moves, besides the parameters."""

    buffers: dict[str, Tensor]
    """The module's buffers; empty if there are none."""
    products: Any = ()
    """What linear layers remember that multiply in float8: a `float8.Float8State`; `()` without delayed scaling."""


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
    opt_state: Any
    """The optimizer's state; its count of applied steps excludes skipped ones. With an average a tuple of both."""
    scaler: ScalerState
    """The scaler's state."""
    variables: Variables
    """What the loss reads and a step moves, besides the parameters."""

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The module's buffers; empty if there are none."""
        return self.variables.buffers

    @property
    def ema(self) -> Tree:
        """The average of the parameters, of `ema_decay` or `average`, laid out as they are; `()` without one."""
        for state in _states_of_parts(self.opt_state):
            if isinstance(state, Every):  # an average that moves at every k-th step
                state = state.state
            if isinstance(state, Average):
                return state.average
        return ()

    @property
    def float8(self) -> Any:
        """The `float8.Float8State` of the layers that multiply in float8; `()` without delayed scaling."""
        return self.variables.products


class Metrics(NamedTuple):
    """Per-step metrics: scalar float32 tensors, except int64 counts and aux."""

    loss: Tensor
    """The unscaled loss in the loss's dtype; the mean over micro-batches, by their weight."""
    grad_norm: Tensor
    """The 2-norm of the unscaled gradients before clipping; infinite or NaN if the step was skipped."""
    scale: Tensor
    """The scale that multiplied this step's loss."""
    lr: Any
    """The learning rate of this step, float32: a dict by label for `by_group`, `()` for an optimizer without a rate.
    A skipped step did not use it."""
    found_inf: Tensor
    """1.0 if this step was skipped."""
    exhausted: Tensor
    """1.0 if it was skipped and the scale cannot be lowered (`funcamp.exhausted`)."""
    saturated: Tensor
    """1.0 if the scale is due to grow and cannot (`funcamp.saturated`)."""
    applied: Tensor
    """int64: steps applied so far, including this one."""
    skipped: Tensor
    """int64: steps skipped so far, including this one."""
    consecutive_skips: Tensor
    """int64: steps skipped since the last applied one, including this one."""
    observed: dict[str, Any]
    """The results of the `observe` functions, by name."""
    records: Mapping[str, Any]
    """The counts of taps, as `numerics.Records`: a `numerics.Record` by name, whose backward counts are of scaled
    gradients (`Record.unscale(metrics.scale)`); `{}` without probes."""
    aux: Any
    """The auxiliary outputs of the loss, stacked over micro-batches; `()` without has_aux."""

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for a logger: every metric by its name, entries of dicts as `lr/matrix`, `aux/hits`.

        Leaves out records and the metrics of options that are not set. The values are tensors; a `MetricReader` turns
        them into numbers. No sync.

        Raises:
            ValueError: two entries of nested dicts have the same name: `{"a/b": ..., "a": {"b": ...}}`.

        Example:
            >>> step = make_train_step(lambda p, x: (p["w"] * x).sum(), stateless(torch.optim.SGD, lr=0.5))
            >>> _, metrics = step(step.init({"w": torch.ones(2)}), torch.ones(2))
            >>> row = metrics.to_dict()
            >>> row["loss"], row["lr"], "aux" in row
            (tensor(2.), tensor(0.5000), False)
        """
        found: dict[str, Any] = {}
        for name in self._fields:
            value = getattr(self, name)
            if name != "records" and not (isinstance(value, tuple) and not value):
                for key, item in _entries(name, value):
                    if key in found:
                        raise ValueError(
                            f"to_dict: metrics must have one entry by each name; got two by {key!r}: rename one "
                            f"in {name}"
                        )
                    found[key] = item
        return found


def _entries(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield name, value
        return
    for key, item in value.items():
        yield from _entries(f"{name}/{key}", item)


def check_train_state(call: str, name: str, value: object, hint: str = "") -> None:
    """Raise TypeError if a value is not a state."""
    if not isinstance(value, TrainState):
        if not hint and isinstance(value, tuple) and value and isinstance(value[0], TrainState):
            hint = ": write state, metrics = step(state, batch)"
        elif not hint and (value is None or isinstance(value, torch.nn.Module) or callable(value)):
            hint = ": write state = step.init(), of the step that make_train_step made"
        raise TypeError(f"{call}: {name} must be a TrainState, as init makes it; got {_tree.brief(value)}{hint}")


_FROM_TORCH = (
    "a torch loop goes on by model.load_state_dict(...) before init, then "
    "step.from_torch(step.init(), optimizer=..., scaler=...) with the state_dicts of its optimizer and scaler"
)


def export(call: str, state: TrainState) -> dict[str, Tensor]:
    """Return copies of all tensors under their dotted names."""
    found: dict[str, Tensor] = clone(named(expand(gathered(call, state))))
    return found


def named(state: TrainState) -> dict[str, Tensor]:
    """Return the tensors of a state by the names under which they are saved."""
    pairs = zip(saved_names(state), _tree.leaves(state))
    return {name: leaf for name, leaf in pairs if leaf is not None}


def saved_names(state: TrainState) -> list[str]:
    """Return the name under which each leaf of a state is saved.

    These are the names of the first format, in which buffers, average and float8 state were fields of the state.
    """
    renamed = {"variables.buffers.": "buffers.", "variables.products.": "float8."}
    parts = list(enumerate(_states_of_parts(state.opt_state)))
    averages = [number for number, part in parts if isinstance(part, Average)]
    others = [number for number, part in parts if not is_average(part)]
    if len(averages) == 1:
        renamed[f"opt_state.{averages[0]}.average."] = "ema."
    if len(others) == 1:
        renamed[f"opt_state.{others[0]}."] = "opt_state."
    names = []
    for name in _tree.names(state):
        former = next((prefix for prefix in renamed if name.startswith(prefix)), "")
        names.append(renamed.get(former, "") + name.removeprefix(former))
    return names


def _states_of_parts(opt_state: Any) -> tuple[Any, ...]:
    """Return the states of the parts of a chain; none if only one has a state, which is then the chain's."""
    return opt_state if type(opt_state) is tuple else ()


@torch.inference_mode(False)  # autograd rejects inference tensors outside inference mode
def restore(
    saved: dict[str, Tensor],
    like: TrainState,
    strict: bool = True,
    *,
    split: Callable[[TrainState, Mapping[str, object]], TrainState],
) -> TrainState:
    """Return the state that `export` saved, laid out as like; if not strict, like fills what is missing.

    split: lays out like again, with parameters of different values in separate groups.
    """
    call = "load_state_dict"
    check_train_state(call, "like", like)
    if not isinstance(saved, dict):
        raise TypeError(f"{call}: saved must be a dict, as state_dict gives it; got {_tree.brief(saved)}")
    if not strict:
        own = export(call, like)
        if not own.keys() & {name for name in saved if str(name).startswith("params.")}:
            raise ValueError(f"{call}: saved must hold at least one parameter of like; it holds none: {_FROM_TORCH}")
        saved = {name: saved.get(name, value) for name, value in own.items()}
    full = _tree.map_nodes(Params, lambda node: node.outline(), like)
    tree = expand(full)
    leaves, spec = _tree.flatten(tree)
    names = [None if leaf is None else name for name, leaf in zip(saved_names(tree), leaves)]
    odd = set(saved) ^ {name for name in names if name is not None}
    if odd:
        first = min(odd, key=str)
        kind = "has unknown" if first in saved else "lacks"
        fix = "" if set(saved) - odd else f": {_FROM_TORCH}"
        raise ValueError(f"{call}: saved must hold the names that state_dict gives; it {kind} {first!r}{fix}")
    new: list[Tensor | None] = []
    for name, leaf in zip(names, leaves):
        if name is None:
            new.append(None)
            continue
        value = saved[name]
        check_like(call, name, value, leaf)
        new.append(value.detach().to(leaf.device, copy=True))
    values = _tree.unflatten(new, spec)
    full = collapse(full, values)
    check_values(call, full)
    for name, given, kept in zip(names, new, _tree.leaves(expand(full))):
        if given is None or kept is None or kept is given or kept.dim():
            continue
        if not torch.allclose(given, kept, rtol=0, atol=0, equal_nan=True):
            # Flat storage has one count a group: parameters that were frozen or added later have another.
            if like.params.layout.flat:
                return restore(saved, split(like, _counts(like, values)), split=split)
            raise ValueError(
                f"{call}: saved must hold one count for all parameters that lie in one group of flat storage; "
                f"got {given.item():g} for {name!r} and {kept.item():g} for another. Give parameters that were added "
                "later a label of their own, init(group=...), or use init(flat=False)"
            )
    state: TrainState = _tree.map_nodes(Params, lambda node, part: node.cut_like(part), like, full)
    return state


def _counts(like: TrainState, values: Tree) -> dict[str, object]:
    """Return, for every parameter, the numbers in values of which flat storage has one a group."""
    names = _tree.names(like.params.tree())
    found: list[list[float]] = [[] for _ in names]

    def note(node: Params, part: Tree) -> Params:
        if all(group is None or group.dim() == 0 for group in node.groups):
            for numbers, leaf in zip(found, _tree.leaves(part)):
                numbers += [] if leaf is None else [leaf.item()]
        return node

    _tree.map_nodes(Params, note, like, values)
    return dict(zip(names, found))


def gathered(call: str, state: TrainState) -> TrainState:
    """Return the full state, as `distributed.gather_state` does."""
    check_train_state(call, "state", state)
    if state.params.ranks is None:
        return state
    full: TrainState = _tree.map_nodes(Params, lambda params: params.gathered(), state)
    return full


def check_like(call: str, name: str, value: object, like: Tensor) -> None:
    """Raise ValueError if a saved value cannot take the place of a tensor."""
    kinds = ("shape", "dtype", "layout")
    if not isinstance(value, Tensor) or value.is_meta or any(getattr(value, k) != getattr(like, k) for k in kinds):
        got, fix = _tree.describe(value), ""
        if isinstance(value, Tensor) and (value.is_meta or value.layout != like.layout):
            got = f"{got}, {value.layout}"
            fix = ": load it with its values" if value.is_meta else ": to_dense() makes one"
        rule = f"must be like {_tree.describe(like)}, dense, with values"
        raise ValueError(f"{call}: saved[{name!r}] {rule}; got {got}{fix}")


def check_values(call: str, state: TrainState) -> None:
    """Raise ValueError for a scale, flag or count that is impossible or unrecoverable; reads the host."""

    def check(name: str, value: Tensor, holds: Tensor, rule: str) -> None:
        if not bool(holds.all()):
            raise ValueError(f"{call}: saved[{name!r}] must be {rule}; got {value[~holds].flatten()[0].item():g}")

    def counts_of(node: OptState | Average) -> Any:
        if isinstance(node, Average):  # it stays, because names depend on it
            return Average(None)
        return {"applied": node.applied, "state.step": node.state.get("step")}

    scaler = state.scaler
    check("scaler.scale", scaler.scale, (scaler.scale > 0) & scaler.scale.isfinite(), "above 0 and finite")
    check("scaler.found_inf", scaler.found_inf, (scaler.found_inf == 0) | (scaler.found_inf == 1), "0 or 1")
    counters: dict[str, Tensor] = getattr(scaler, "counters", {})
    of_rule = {name: counters[name] for name in ("since_rescale", "overflows") if name in counters}  # others: any sign
    counts: Any = state._replace(
        params=None,  # type: ignore[arg-type]
        opt_state=_tree.select_nodes((OptState, Average), counts_of, state.opt_state),
        scaler={"growth_tracker": scaler.growth_tracker, "counters": of_rule},  # type: ignore[arg-type]
        variables=None,  # type: ignore[arg-type]
    )
    for name, count in named(counts).items():
        check(name, count, count >= 0, "0 or more")
    for name, limit in (("skipped", "step"), ("consecutive_skips", "skipped")):
        part, whole_count = getattr(state, name), getattr(state, limit)
        check(name, part, part <= whole_count, f"at most saved[{limit!r}]")
