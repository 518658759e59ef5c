"""Hyperparameters per group: several optimizers, each for a part of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._check import Fixed
from funcamp._optim.hyperparameters import ANOTHER
from funcamp._optim.optimizer import OptState
from funcamp._optim.part import (
    Update,
    apply_part,
    check_optimizer,
    evaluation_params_of,
    first_state,
    is_rate,
    learning_rate_of,
)
from funcamp._storage.params import Params, matrix_or_vector
from funcamp._trace.tracing import compiling
from funcamp._types import Tree


class GroupedOptimizer(Fixed):
    """Several optimizers as one; made by `by_group`."""

    _instead = ANOTHER

    optimizers: dict[str, Any]
    group: Callable[[str, Tensor], str]

    def __init__(self, optimizers: Mapping[str, Any], group: Callable[[str, Tensor], str]) -> None:
        self.optimizers = dict(optimizers)
        self.group = group
        self._last_checked: object = None
        """The layout whose labels were compared last with those of `group`."""

    def __repr__(self) -> str:
        return f"by_group({self.optimizers!r})"

    def init(self, params: Tree) -> dict[str, OptState]:
        """Return the initial state of every optimizer, by label; see `StatelessOptimizer.init`."""
        labels = self._labels("init", params)
        device = next((param.device for param in _tree.tensors_in(params)), torch.get_default_device())
        states = {}
        with torch.device(device):  # an optimizer without a parameter does not know where its counts belong
            for label, optimizer in self.optimizers.items():
                states[label] = first_state(optimizer, _of_label(params, labels, label))
        return states

    def update(self, params: Tree, grads: Tree, opt_state: Tree) -> tuple[Tree, Tree]:
        """Take one step with every optimizer on its group; see `StatelessOptimizer.update`."""
        _tree.same_structure("update", ("params", "grads"), (params, grads))
        if not isinstance(opt_state, dict) or opt_state.keys() != self.optimizers.keys():
            raise TypeError(
                f"update: opt_state must hold a state for each of {sorted(self.optimizers)}; "
                f"got {_tree.brief(opt_state)}"
            )
        labels = self._labels("update", params)
        states = {}
        for label, optimizer in self.optimizers.items():
            update = Update(_of_label(params, labels, label), _of_label(grads, labels, label))
            update, states[label] = apply_part(optimizer, update, opt_state[label])
            params = _with_leaves(params, update.params)
        return params, states

    def learning_rate(self, opt_state: Tree) -> dict[str, Tree]:
        """Return the learning rates of the next step, of the labels whose optimizer has one."""
        rates: dict[str, Tree] = {}
        for label, optimizer in self.optimizers.items():
            rate = learning_rate_of(optimizer, opt_state[label])
            if is_rate(rate):
                rates[label] = rate
        return rates

    def evaluation_params(self, params: Tree, opt_state: Tree) -> Tree:
        """Return the parameters to evaluate with, of every optimizer; see `StatelessOptimizer.evaluation_params`."""
        labels = self._labels("evaluation_params", params)
        for label, optimizer in self.optimizers.items():
            params_of_label = _of_label(params, labels, label)
            params = _with_leaves(params, evaluation_params_of(optimizer, params_of_label, opt_state[label]))
        return params

    def _labels(self, call: str, params: Tree) -> list[str | None]:
        """Return the label of every leaf, None for None; `Params` have labels since they were created.

        Raises:
            ValueError: a label has no optimizer, or is not the one that `group` returns.
        """
        labels: list[str | None]
        if isinstance(params, Params):
            labels = list(params.layout.labels)
            if torch.compiler.is_dynamo_compiling() or self._last_checked is not params.layout:
                self._check_labels(call, params)
        else:
            labels = self._own_labels(params)
        for label in labels:
            if label is not None and label not in self.optimizers:
                raise ValueError(
                    f"{call}: every group must have an optimizer, one of {sorted(self.optimizers)}; got {label!r}"
                )
        return labels

    def _check_labels(self, call: str, params: Params) -> None:
        """Raise ValueError if `Params` were created with another function than `group`."""
        tree = params.placeholders()  # no views of the stored values: a rank may have a part of them only
        labels = params.layout.label_of()
        for name, own_label in zip(_tree.names(tree), self._own_labels(tree)):
            label = labels.get(name)
            if own_label not in (None, label):
                raise ValueError(
                    f"{call}: params must have the labels that by_group's own group returns; got {label!r} for "
                    f"{name!r}, which it labels {own_label!r}: pass init or ravel no other group, and begin anew with "
                    "step.init(state.params.tree()) after a change of group; a rate that changes later is a schedule"
                )
        if not compiling():
            self._last_checked = params.layout

    def _own_labels(self, tree: Tree) -> list[str | None]:
        """Return the label that `group` returns for every leaf of a tree, None for None."""
        names_and_leaves = zip(_tree.names(tree), _tree.leaves(tree))
        return [None if leaf is None else self.group(name, leaf) for name, leaf in names_and_leaves]


def by_group(
    optimizers: Mapping[str, Any], *, group: Callable[[str, Tensor], str] = matrix_or_vector
) -> GroupedOptimizer:
    """Combine one optimizer per group of parameters, as torch.optim's param_groups do.

    For example: no decay on vectors, Muon for matrices and AdamW for the rest, a smaller rate for the head. The result
    has the `init` and `update` of an optimizer. `Params` use the labels with which they were created: pass `ravel`
    the same group (a step's `init` takes it from here). A training step skips all groups together, where two optimizers
    of torch under one scaler skip each by its own gradients. No sync.

    Args:
        optimizers: a mapping from label to optimizer: the result of `stateless`, or any object with such an init and
            update.
        group: a function from a leaf's dotted name and the tensor to a label, which does not depend on values; by
            default "matrix" or "vector".

    Returns:
        A `GroupedOptimizer`.

    Raises:
        TypeError: optimizers is not a mapping to objects with init and update; group is not callable.
        ValueError: when used: a label has no optimizer; `Params` were created with another group.

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
        check_optimizer("by_group", f"optimizers[{label!r}]", optimizer)
    if not callable(group):
        raise TypeError(f"by_group: group must be callable; got {group!r}")
    return GroupedOptimizer(optimizers, group)


def _of_label(tree: Tree, labels: list[str | None], label: str) -> Tree:
    """Return the same tree with None for every leaf of another label."""
    flat, spec = _tree.flatten(tree)
    flat_of_label = [leaf if leaf_label == label else None for leaf, leaf_label in zip(flat, labels)]
    return _tree.unflatten(flat_of_label, spec)


def _with_leaves(tree: Tree, new_leaves: Tree) -> Tree:
    """Return a tree with new leaves, those of a tree that is None elsewhere."""
    flat, spec = _tree.flatten(tree)
    return _tree.unflatten([old if new is None else new for old, new in zip(flat, _tree.leaves(new_leaves))], spec)
