"""How a state is saved under dotted names and loaded: the names, the layout, and which values are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._dtensor import empty_full
from funcamp._optim.average import Average
from funcamp._optim.chain import average_in
from funcamp._step.parallel import Parallel
from funcamp._step.state import TrainState, check_train_state, states_of_parts
from funcamp._storage.params import Params, clone, collapse, expand

#: For a state of another model or optimizer.
_SHARED_NAMES = "{name: saved.get(name, value) for name, value in step.state_dict(like).items()}"
_FROM_TORCH = (
    "a torch loop goes on by model.load_state_dict(...) before init, then "
    "step.from_torch(step.init(), optimizer=..., scaler=...) with the state_dicts of its optimizer and scaler"
)


# Saving.


def export(call: str, state: TrainState) -> dict[str, Tensor]:
    """Return copies of all tensors under their dotted names."""
    copies: dict[str, Tensor] = clone(tensors_by_name(expand(gather(call, state))))
    return copies


def gather(call: str, state: TrainState) -> TrainState:
    """Return the full state, as `distributed.gather_state` does."""
    check_train_state(call, "state", state)
    full_state: TrainState = _tree.map_nodes(Params, lambda params: params.gathered(), state)
    return full_state


def tensors_by_name(state: TrainState) -> dict[str, Tensor]:
    """Return the tensors of a state by the names under which they are saved."""
    named_leaves = zip(saved_names(state), _tree.leaves(state))
    return {name: leaf for name, leaf in named_leaves if leaf is not None}


def saved_names(state: TrainState) -> list[str]:
    """Return the name under which each leaf of a state is saved.

    These are the names of the first format, which had one average, a field of the state, next to the optimizer's: the
    only one is `ema.*`, one of several is `opt_state.NUMBER.average.*`, with its number in the chain, and one that
    `every` delays is `opt_state.NUMBER.state.average.*`.
    """
    parts = list(enumerate(states_of_parts(state.opt_state)))
    averages = [rf"^opt_state\.{number}\.average\." for number, part in parts if isinstance(part, Average)]
    others = [rf"^opt_state\.{number}\." for number, part in parts if average_in(part) is None]
    names = _tree.names(state)
    for saved_prefix, prefixes in (("ema.", averages), ("opt_state.", others)):
        if len(prefixes) == 1:  # several keep their numbers
            names = [re.sub(prefixes[0], saved_prefix, name) for name in names]
    return names


# Loading.


@torch.inference_mode(False)  # autograd rejects inference tensors outside inference mode
def restore(call: str, saved: dict[str, Tensor], like: TrainState, parallel: Parallel) -> TrainState:
    """Return the state that `export` saved, laid out as like, a state of a step with this communication."""
    check_train_state(call, "like", like)
    # The full state like `like`, as the trees that were saved; of its values only shapes, dtypes and devices are used.
    full_like = _tree.map_nodes(Params, lambda params: params.gathered(empty_full), like)
    tree_like = expand(full_like)
    values = copies_like(call, saved, tensors_by_name(tree_like))

    # The saved values in that tree, and in its groups.
    remaining = iter(values.values())
    tree = _tree.map_leaves(lambda _: next(remaining), *_tree.flatten(tree_like))
    full_state = collapse(full_like, tree)
    check_scale(call, full_state)
    _check_counts(call, values, tensors_by_name(expand(full_state)))
    state: TrainState = _tree.map_nodes(Params, parallel.own_part, full_state)
    return state


def copies_like(call: str, saved: object, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the saved values in the order and on the devices of like.

    Raises:
        TypeError: saved is not a dict.
        ValueError: saved has other names, shapes or dtypes than like.
    """
    if not isinstance(saved, dict):
        raise TypeError(f"{call}: saved must be a dict of tensors by name; got {_tree.brief(saved)}")
    _check_names(call, saved, like.keys())
    values: dict[str, Tensor] = {}
    for name, tensor_like in like.items():
        _check_like(call, name, saved[name], tensor_like)
        values[name] = saved[name].detach().to(tensor_like.device, copy=True)
    return values


def _check_names(call: str, saved: Mapping[str, Tensor], expected: AbstractSet[str]) -> None:
    """Raise ValueError if a name is missing among the saved ones or unknown."""
    odd = saved.keys() ^ expected
    if not odd:
        return
    # A parameter says more than what the optimizer keeps of it.
    first = min(odd, key=lambda name: (not str(name).startswith("params."), str(name)))
    kind = "has unknown" if first in saved else "lacks"
    fix = f"; {len(odd)} of {len(expected)} names differ. To take those that both have: {_SHARED_NAMES}"
    # Nothing in common: the contents of a file, or another kind of state_dict, such as a module's.
    if not saved.keys() & expected:
        fix = f": {_FROM_TORCH}"
    for key, value in saved.items():
        if isinstance(value, Mapping) and value.keys() & expected:
            fix = f": pass saved[{key!r}], which has them"
    raise ValueError(f"{call}: saved must hold the names under which like is saved; it {kind} {first!r}{fix}")


def _check_counts(call: str, values: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a saved count is not the one that the layout stores: flat storage has one a group. Syncs.

    Args:
        call: the public function, for errors.
        values: the saved values by name.
        stored: the same after the layout has stored them.
    """
    for name, value in values.items():
        # Only an optimizer's numbers, such as counts, are stored once for several parameters.
        is_number = name.startswith("opt_state.") and value.dim() == 0
        if is_number and not torch.equal(value, stored[name]):
            raise ValueError(
                f"{call}: saved must hold one count for all parameters that lie in one group of flat storage; got "
                f"{value.item():g} for {name!r} and {stored[name].item():g} for another, as after a part was frozen or "
                "added later: use init(flat=False), or, if the state is sharded, give such parameters a label of their "
                "own, init(group=...)"
            )


# What is refused.


def _check_like(call: str, name: str, value: object, like: Tensor) -> None:
    """Raise ValueError if a saved value cannot take the place of a tensor."""
    if isinstance(value, Tensor) and (value.shape, value.dtype, value.layout) == (like.shape, like.dtype, like.layout):
        return
    raise ValueError(f"{call}: saved[{name!r}] must be like {_tree.describe(like)}; got {_tree.describe(value)}")


def check_scale(call: str, state: TrainState) -> None:
    """Raise ValueError for a scale with which no step can go on, as torch's scaler may save it; reads the host."""
    scale = state.scaler.scale
    if not bool((scale > 0) & scale.isfinite()):
        raise ValueError(f"{call}: saved['scaler.scale'] must be above 0 and finite; got {scale.item():g}")
