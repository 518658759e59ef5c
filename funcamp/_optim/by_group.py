"""Hyperparameters per group: several optimizers, each for a part of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._check import Fixed
from funcamp._optim.hyperparameters import ANOTHER
from funcamp._optim.stateless import OptState
from funcamp._optim.wrong_arguments import as_stateless, path_of
from funcamp._storage.params import Params, matrix_or_vector
from funcamp._types import Tree


class GroupedOptimizer(Fixed):
    """Several optimizers as one; made by `by_group`."""

    _instead = ANOTHER

    optimizers: dict[str, Any]
    group: Callable[[str, Tensor], str]

    def __init__(self, optimizers: Mapping[str, Any], group: Callable[[str, Tensor], str]) -> None:
        self.optimizers, self.group = dict(optimizers), group

    def __repr__(self) -> str:
        return f"by_group({self.optimizers!r})"

    def init(self, params: Tree) -> dict[str, OptState]:
        """Return the initial state of every optimizer, by label; see `StatelessOptimizer.init`."""
        labels = self._labels("init", params)
        return {label: optimizer.init(_part(params, labels, label)) for label, optimizer in self.optimizers.items()}

    def update(self, params: Tree, grads: Tree, opt_state: Any) -> tuple[Tree, Any]:
        """Take one step with every optimizer on its group; see `StatelessOptimizer.update`."""
        _tree.same_structure("update", ("params", "grads"), (params, grads))
        if not isinstance(opt_state, dict) or opt_state.keys() != self.optimizers.keys():
            raise TypeError(
                f"update: opt_state must hold a state for each of {sorted(self.optimizers)}; "
                f"got {_tree.brief(opt_state)}"
            )
        labels = self._labels("update", params)
        flat, spec = _tree.flatten(params)
        states = {}
        for label, optimizer in self.optimizers.items():
            new, states[label] = optimizer.update(
                _part(params, labels, label), _part(grads, labels, label), opt_state[label]
            )
            flat = [value if mine is None else mine for value, mine in zip(flat, _tree.leaves(new))]
        return _tree.unflatten(flat, spec), states

    def learning_rate(self, opt_state: Any) -> dict[str, Any]:
        """Return the learning rates of the next step, by label; see `StatelessOptimizer.learning_rate`."""
        rates = {label: getattr(optimizer, "learning_rate", None) for label, optimizer in self.optimizers.items()}
        return {label: rate(opt_state[label]) for label, rate in rates.items() if rate is not None}

    def _labels(self, call: str, params: Tree) -> list[str | None]:
        """Return the label of every leaf; `Params` have them."""
        if isinstance(params, Params):
            labels: list[str | None] = list(params.layout.labels)
        else:
            leaves = _tree.leaves(params)
            labels = [None if v is None else self.group(n, v) for n, v in zip(_tree.names(params), leaves)]
        for label in labels:
            if label is not None and label not in self.optimizers:
                raise ValueError(
                    f"{call}: every group must have an optimizer, one of {sorted(self.optimizers)}; got {label!r}"
                )
        return labels


def by_group(
    optimizers: Mapping[str, Any], *, group: Callable[[str, Tensor], str] = matrix_or_vector
) -> GroupedOptimizer:
    """Combine one optimizer per group of parameters, as torch.optim's param_groups do.

    For example: no decay on vectors, Muon for matrices and AdamW for the rest, a smaller rate for the head. The result
    has the `init` and `update` of an optimizer. `Params` use the labels with which they were created: pass `ravel`
    the same group (a step's `init` takes it from here). No sync.

    Args:
        optimizers: a mapping from label to optimizer: the result of `stateless`, or any object with such an init and
            update.
        group: a function from a leaf's dotted name and the tensor to a label; by default "matrix" or "vector".

    Returns:
        A `GroupedOptimizer`.

    Raises:
        TypeError: optimizers is not a mapping from strings to objects with init and update; group is not callable.
        ValueError: when used: a label has no optimizer.

    Example:
        >>> adamw = by_group({
        ...     "matrix": stateless(torch.optim.AdamW, weight_decay=0.1),
        ...     "vector": stateless(torch.optim.AdamW, weight_decay=0.0),
        ... })
        >>> params = {"w": torch.ones(2, 2), "b": torch.zeros(2)}
        >>> sorted(adamw.init(params))
        ['matrix', 'vector']
    """
    if not isinstance(optimizers, Mapping) or not optimizers:
        raise TypeError(
            f"by_group: optimizers must be a mapping from labels to optimizers; got {_tree.brief(optimizers)}"
        )
    for label, optimizer in optimizers.items():
        if not isinstance(label, str):
            raise TypeError(f"by_group: optimizers must have strings as labels; got {label!r}")
        check_optimizer("by_group", f"optimizers[{label!r}]", optimizer)
    if not callable(group):
        raise TypeError(f"by_group: group must be callable; got {group!r}")
    return GroupedOptimizer(optimizers, group)


def check_optimizer(call: str, name: str, optimizer: Any) -> None:
    """Raise TypeError if a value has no init and update."""
    if isinstance(optimizer, torch.optim.Optimizer):
        groups = "" if len(optimizer.param_groups) == 1 else ", one for each of its groups in by_group({...})"
        raise TypeError(
            f"{call}: {name} must be a pure optimizer with init and update, and takes no parameters: write "
            f"{as_stateless(optimizer)}{groups}; got one of class {type(optimizer).__name__}"
        )
    if isinstance(optimizer, type) or not (
        callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))
    ):
        write = "as stateless(...) gives"
        if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
            write = f"write stateless({path_of(optimizer)}, lr=...)"
        raise TypeError(f"{call}: {name} must have init and update, {write}; got {_tree.brief(optimizer)}")


def _part(tree: Tree, labels: list[str | None], label: str) -> Tree:
    flat, spec = _tree.flatten(tree)
    return _tree.unflatten([leaf if mine == label else None for leaf, mine in zip(flat, labels)], spec)
