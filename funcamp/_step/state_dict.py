"""How a state is saved under dotted names and loaded: the names, the layout, and which values are refused."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._check import boolean
from funcamp._optim.average import Average
from funcamp._optim.chain import average_in
from funcamp._step.state import TrainState, check_train_state, states_of_parts
from funcamp._storage.params import Params, clone, collapse, expand

_FROM_TORCH = (
    "a torch loop goes on by model.load_state_dict(...) before init, then "
    "step.from_torch(step.init(), optimizer=..., scaler=...) with the state_dicts of its optimizer and scaler"
)
#: The names of `saved_names` for an average: of the only one, of one of several, and of one that `every` delays.
_AVERAGE_NAME = re.compile(r"^(ema|opt_state\.\d+(\.state)?\.average)(?=\.|$)")


#: The names of `saved_names` for counts of a step, a scaler, and an optimizer with or without a number in a chain and a
#: label. Other counters of rules may have any sign.
_COUNT_NAME = re.compile(
    r"step|skipped|consecutive_skips|scaler\.(growth_tracker|counters\.(since_rescale|overflows))"
    r"|opt_state\.(\d+\.)?([^.]+\.)?(applied|state\.step(\..+)?)"
)


# Saving.


def export(call: str, state: TrainState) -> dict[str, Tensor]:
    """Return copies of all tensors under their dotted names."""
    copies: dict[str, Tensor] = clone(tensors_by_name(expand(gather(call, state))))
    return copies


def gather(call: str, state: TrainState) -> TrainState:
    """Return the full state, as `distributed.gather_state` does."""
    check_train_state(call, "state", state)
    if state.params.ranks is None:
        return state
    full_state: TrainState = _tree.map_nodes(Params, lambda params: params.gathered(), state)
    return full_state


def tensors_by_name(state: TrainState) -> dict[str, Tensor]:
    """Return the tensors of a state by the names under which they are saved."""
    tensors: dict[str, Tensor] = {}
    for name, leaf in zip(saved_names(state), _tree.leaves(state)):
        if leaf is not None:
            tensors[name] = leaf
    return tensors


def saved_names(state: TrainState) -> list[str]:
    """Return the name under which each leaf of a state is saved.

    These are the names of the first format, in which an average was a field of the state: the only one is `ema.*`, one
    of several is `opt_state.NUMBER.average.*`, and one that `every` delays is `opt_state.NUMBER.state.average.*`, with
    its number in the chain (`_AVERAGE_NAME`).
    """
    averages: list[int] = []
    others: list[int] = []
    for number, part_state in enumerate(states_of_parts(state.opt_state)):
        if isinstance(part_state, Average):
            averages.append(number)
        elif average_in(part_state) is None:
            others.append(number)

    saved_prefixes: dict[str, str] = {}
    # The first format had one average next to the optimizer's state. If there are several, each keeps its number in the
    # chain.
    if len(averages) == 1:
        saved_prefixes[f"opt_state.{averages[0]}.average."] = "ema."
    if len(others) == 1:
        saved_prefixes[f"opt_state.{others[0]}."] = "opt_state."

    names: list[str] = []
    for name in _tree.names(state):
        for prefix, saved_prefix in saved_prefixes.items():
            if name.startswith(prefix):
                name = saved_prefix + name.removeprefix(prefix)
                break
        names.append(name)
    return names


# Loading.


@torch.inference_mode(False)  # autograd rejects inference tensors outside inference mode
def restore(saved: dict[str, Tensor], like: TrainState, strict: bool = True) -> TrainState:
    """Return the state that `export` saved, laid out as like; if not strict, like fills what is missing."""
    call = "load_state_dict"
    check_train_state(call, "like", like)
    if not isinstance(saved, dict):
        raise TypeError(f"{call}: saved must be a dict, as state_dict gives it; got {_tree.brief(saved)}")
    if not boolean(call, "strict", strict):
        saved = _filled(call, saved, like)

    # The full state like `like`, as the trees that were saved.
    full_like = _tree.map_nodes(Params, lambda params: params.outline(), like)
    tree_like = expand(full_like)
    tensors_like = tensors_by_name(tree_like)
    _check_names(call, saved, tensors_like.keys())

    # The saved values in that tree, and in its groups.
    values: dict[str, Tensor] = {}
    for name, tensor_like in tensors_like.items():
        check_like(call, name, saved[name], tensor_like)
        values[name] = saved[name].detach().to(tensor_like.device, copy=True)
    remaining = iter(values.values())
    tree = _tree.map_leaves(lambda _: next(remaining), *_tree.flatten(tree_like))
    full_state = collapse(full_like, tree)
    check_values(call, full_state)
    _check_counts(call, values, tensors_by_name(expand(full_state)))
    state: TrainState = _tree.map_nodes(Params, lambda params, full: params.cut_like(full), like, full_state)
    return state


def _filled(call: str, saved: Mapping[str, Tensor], like: TrainState) -> dict[str, Tensor]:
    """Return the saved tensors that like has, and like's for names that are not saved; averages begin as parameters.

    Raises:
        ValueError: no parameter of like is saved.
    """
    full_like = expand(gather(call, like))
    own_tensors = tensors_by_name(full_like)
    if not any(name.startswith("params.") and name in saved for name in own_tensors):
        raise ValueError(f"{call}: saved must hold at least one parameter of like; it holds none: {_FROM_TORCH}")
    lost_averages = [
        name for name in saved if name not in own_tensors and _AVERAGE_NAME.sub("params", str(name)) in own_tensors
    ]
    if lost_averages:
        warnings.warn(
            f"{call}: saved has an average of the parameters that like has not: {len(lost_averages)} tensors, from "
            f"{lost_averages[0]!r} to {lost_averages[-1]!r}, are left out: load it with a step that has the same "
            "average (ema_decay) to keep it, or take these names out of saved",
            stacklevel=5,  # the caller of `TrainStep.load_state_dict`
        )

    def as_parameters(average: Average) -> Average:
        leaves, spec = _tree.flatten(average.average)
        for index, (name, own) in enumerate(zip(_tree.names(average.average), leaves)):
            parameter = saved.get(f"params.{name}")
            if isinstance(parameter, Tensor) and parameter.shape == own.shape and parameter.dtype == own.dtype:
                leaves[index] = parameter
        return Average(_tree.unflatten(leaves, spec))

    first_tensors = tensors_by_name(_tree.map_nodes(Average, as_parameters, full_like))
    return {name: saved.get(name, first) for name, first in first_tensors.items()}


def _check_names(call: str, saved: Mapping[str, Tensor], expected: AbstractSet[str]) -> None:
    """Raise ValueError if a name is missing among the saved ones or unknown."""
    odd = saved.keys() ^ expected
    if not odd:
        return
    first = min(odd, key=str)
    kind = "has unknown" if first in saved else "lacks"
    # Nothing in common: another kind of state_dict, such as a module's.
    fix = "" if saved.keys() & expected else f": {_FROM_TORCH}"
    raise ValueError(f"{call}: saved must hold the names that state_dict gives; it {kind} {first!r}{fix}")


def _check_counts(call: str, values: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a saved count is not the one that the layout stores: flat storage has one a group. Syncs.

    Args:
        call: the public function, for errors.
        values: the saved values by name.
        stored: the same after the layout has stored them.
    """
    for name, value in values.items():
        stored_value = stored[name]
        # Only numbers, such as counts, are stored once for several parameters.
        if stored_value is value or stored_value.dim():
            continue
        if not torch.allclose(value, stored_value, rtol=0, atol=0, equal_nan=True):
            raise ValueError(
                f"{call}: saved must hold one count for all parameters that lie in one group of flat storage; got "
                f"{value.item():g} for {name!r} and {stored_value.item():g} for another, as after a part was frozen or "
                "added later: use init(flat=False), or give such parameters a label of their own, init(group=...)"
            )


# What is refused.


def check_like(call: str, name: str, value: object, like: Tensor) -> None:
    """Raise ValueError if a saved value cannot take the place of a tensor."""
    fix = ""
    if isinstance(value, Tensor):
        if value.is_meta:
            fix = ": load it with its values"
        elif value.layout != like.layout:
            fix = ": to_dense() makes one"
        elif value.shape == like.shape and value.dtype == like.dtype:
            return
    rule = f"must be like {_tree.describe(like)}, dense, with values"
    raise ValueError(f"{call}: saved[{name!r}] {rule}; got {_tree.describe(value)}{fix}")


def check_values(call: str, state: TrainState) -> None:
    """Raise ValueError for a scale, flag or count that is impossible or unrecoverable; reads the host."""
    step, skipped, in_a_row = state.step, state.skipped, state.consecutive_skips
    scale, found_inf = state.scaler.scale, state.scaler.found_inf
    rules = [
        ("scaler.scale", scale, (scale > 0) & scale.isfinite(), "above 0 and finite"),
        ("scaler.found_inf", found_inf, (found_inf == 0) | (found_inf == 1), "0 or 1"),
    ]
    for name, value in tensors_by_name(state).items():
        if _COUNT_NAME.fullmatch(name):
            rules.append((name, value, value >= 0, "0 or more"))
    rules.append(("skipped", skipped, skipped <= step, "at most saved['step']"))
    rules.append(("consecutive_skips", in_a_row, in_a_row <= skipped, "at most saved['skipped']"))
    for name, value, holds, rule in rules:
        if not bool(holds.all()):
            raise ValueError(f"{call}: saved[{name!r}] must be {rule}; got {value[~holds].flatten()[0].item():g}")
