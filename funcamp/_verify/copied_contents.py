"""The user's objects with copies of what they contain, so that a run of the step leaves nothing behind."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from funcamp import _tree
from funcamp._autograd.left_behind import LeftBehind
from funcamp._verify.rounding import distance


class CopiedContents:
    """Modules and other objects, and what they contain.

    Args:
        objects: by name.
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        owners: dict[str, Any] = {}
        for name, found in objects.items():
            owners |= dict(found.named_modules(prefix=name)) if isinstance(found, nn.Module) else {name: found}
        self._containers: dict[str, dict[str, Any]] = {}
        """The dicts of attributes by path, and those of the tensors and modules in a module."""
        for path, owner in owners.items():
            attributes = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
            self._containers[path] = attributes
            for name in {"_parameters", "_buffers", "_modules"} & set(attributes):
                self._containers[f"{path}.{name}"] = attributes[name]
        leaves = _tree.leaves(self._containers)
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # A hook of funcamp's own, which notes what the steps do.
        hooks = [leaf for leaf in leaves if isinstance(leaf, LeftBehind)]
        self._changing = [*self._containers.values(), *map(vars, hooks)]
        """The dicts that get copies."""
        same = [*owners.values(), *hooks, *self._containers.values(), *self.tensors]
        self._memo = {id(item): item for item in same}
        """What is not copied, because closures, views and identities refer to it."""

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Context manager: every attribute is a deep copy, except tensors, which get their values back afterwards."""
        before = [(container, dict(container)) for container in self._changing]
        values = [(tensor, tensor.detach().clone(), tensor.grad if tensor.is_leaf else None) for tensor in self.tensors]
        memo = dict(self._memo)
        try:
            for container, contents in before:
                for name, value in contents.items():
                    with contextlib.suppress(Exception):  # what cannot be copied stays: a lock, a file
                        container[name] = copy.deepcopy(value, memo)
            yield
        finally:
            for container, contents in before:
                container.clear()
                container.update(contents)
            for tensor, value, grad in values:
                # An expanded tensor cannot be written, and a sparse one not be compared.
                if tensor.layout == torch.strided and distance(tensor.detach(), value):
                    tensor.data.copy_(value)
                if tensor.is_leaf:
                    tensor.grad = grad

    def described(self) -> dict[str, str]:
        """Return a description of every attribute by its path, which differs after a change."""
        leaves = map(repr, _tree.leaves(self._containers))
        return dict(zip(_tree.names(self._containers), leaves))
