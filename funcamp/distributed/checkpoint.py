"""States of a sharded step: gathered from all ranks, and as torch.distributed.checkpoint reads and writes them."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._memory import Memory
from funcamp._step.state import TrainState, check_train_state
from funcamp._step.state_dict import check_scale, copies_like, gather, tensors_by_name
from funcamp._storage.params import Params, clone
from funcamp._types import Tree


def gather_state(state: TrainState) -> TrainState:
    """Gather the full state of a step with `DataParallel(shard=True)` from all ranks.

    A collective: call it on every rank. It does one all-gather per group of the parameters, of each optimizer entry and
    of the average. Use it to save under the parameters' plain names, to evaluate with another step, or to continue
    without shards.

    Args:
        state: a state of a step with `DataParallel(shard=True)`; any other state is returned as it is.

    Returns:
        The `TrainState` with full parameters. No host synchronization.

    Raises:
        TypeError: state is not a `TrainState`.

    Example:
        >>> loss_fn = module_loss(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss)
        >>> state = make_train_step(loss_fn, stateless(torch.optim.SGD)).init()
        >>> distributed.gather_state(state).params is state.params
        True
    """
    full_state = gather("gather_state", state)
    if full_state.params is state.params:
        return full_state
    # What is not sharded, and on one rank every leaf, is the state's own tensor, which a donated step writes.
    own = Memory(leaf for leaf in _tree.leaves(state) if leaf is not None)
    leaves, spec = _tree.flatten(full_state)
    gathered: TrainState = _tree.map_leaves(lambda leaf: leaf.clone() if own.meets(leaf) else leaf, leaves, spec)
    return gathered


def sharded_state_dict(state: TrainState) -> dict[str, Tensor]:
    """Return the tensors of a state by name, as torch.distributed.checkpoint reads and writes them.

    Sharded ones are the DTensors of the state. `dcp.save(sharded_state_dict(state), checkpoint_id=path)`. To restore,
    on any number of ranks: create a state with `init`, let `dcp.load` fill `saved = sharded_state_dict(like)`, and pass
    that to `load_sharded_state_dict`. Tensors are copies. No collective (saving and loading are); no host sync.

    Args:
        state: a state of a step with `DataParallel`.

    Returns:
        Tensors by dotted name; flat storage gives its groups, not single parameters.

    Raises:
        TypeError: state is not a `TrainState`.

    Example:
        >>> loss_fn = module_loss(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss)
        >>> state = make_train_step(loss_fn, stateless(torch.optim.SGD)).init()
        >>> list(distributed.sharded_state_dict(state))[:4]
        ['step', 'skipped', 'consecutive_skips', 'params.0']
    """
    copies: dict[str, Tensor] = clone(_tensors_of("sharded_state_dict", "state", state))
    return copies


#: The entry with a fingerprint of the layout: which parameter is at which place in the groups.
_LAYOUT = "layout"


def _tensors_of(call: str, name: str, state: TrainState) -> dict[str, Tensor]:
    """Return the tensors of a state by dotted name, sharded ones as DTensors, and the fingerprint of its layout.

    Args:
        call: the public function, for errors.
        name: the name of its argument.
        state: the argument.
    """
    check_train_state(call, name, state)
    tree = _tree.map_nodes(Params, _by_name, state)
    return tensors_by_name(tree) | {_LAYOUT: torch.tensor(_fingerprint(state.params))}


def _by_name(params: Params) -> Tree:
    """Return flat groups in a list, and single tensors by their names; one with several names by its first."""
    layout = params.layout
    if layout.flat:
        return list(params.groups)
    names = _tree.names(layout.tree(range(len(layout.slots))))
    first_names: dict[int, str] = {}
    for name, slot in zip(names, layout.leaves):
        if slot is not None:
            first_names.setdefault(slot, name)
    return {first_names[slot]: group for slot, group in enumerate(params.groups)}


def _fingerprint(params: Params) -> int:
    """Return a number of 56 bits for the names of the parameters and their places in the groups.

    It is in saved checkpoints, so this text must stay as it is: also the names of the fields of `Slot`, in its repr.
    """
    layout = params.layout
    slot_numbers = range(len(layout.slots))
    described: list[object] = [_tree.names(layout.tree(slot_numbers))]
    if layout.flat:
        described += [layout.leaves, layout.slots, layout.padded_sizes]
    digest = hashlib.sha256(repr(described).encode()).digest()
    return int.from_bytes(digest[:7], "big")


@torch.inference_mode(False)  # autograd rejects inference tensors outside inference mode
def load_sharded_state_dict(saved: dict[str, Tensor], like: TrainState) -> TrainState:
    """Return the state in the dict that `torch.distributed.checkpoint.load` filled.

    Syncs: reads the scale.

    Args:
        saved: the dict of `sharded_state_dict`, filled.
        like: the state it was created from, by `init`, with this process's ranks.

    Returns:
        The `TrainState`.

    Raises:
        TypeError: like is not a `TrainState`, or saved not a dict.
        ValueError: saved has other names, shapes or dtypes than like, or its parameters have another order; the scale
            is not above 0.

    Example:
        >>> loss_fn = module_loss(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss)
        >>> like = make_train_step(loss_fn, stateless(torch.optim.SGD)).init()
        >>> saved = distributed.sharded_state_dict(like)
        >>> distributed.load_sharded_state_dict(saved, like).step
        tensor(0)
    """
    call = "load_sharded_state_dict"
    expected = _tensors_of(call, "like", like)
    # First, because another layout has other names.
    layout = saved.get(_LAYOUT) if isinstance(saved, dict) else None
    if layout is not None and layout != expected[_LAYOUT]:
        raise ValueError(
            f"{call}: saved must hold like's parameters, in its order; got another layout (init(flat=), buckets=): "
            "what gather_state and step.state_dict give is by the names of the parameters, for any layout"
        )
    values = copies_like(call, saved, expected)
    # The names are of a tree with the leaves of like in the same order.
    remaining = iter(values.values())
    state: TrainState = _tree.map_leaves(lambda _: next(remaining), *_tree.flatten(like))
    check_scale(call, state)
    return state
