"""The user's objects with copies of what they contain, so that a run of the step leaves nothing behind."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from funcamp import _tree
from funcamp._autograd.left_behind import LeftBehind


class CopiedContents:
    """Modules and other objects, and what they contain.

    Args:
        objects: the objects.
    """

    def __init__(self, objects: Iterable[object]) -> None:
        owners: list[object] = []
        for found in objects:
            for part in found.modules() if isinstance(found, nn.Module) else [found]:
                owners += [part, *getattr(part, "_forward_pre_hooks", {}).values()]
        # funcamp's own hook notes in its attributes what the steps do.
        self._hooks = [owner for owner in owners if isinstance(owner, LeftBehind)]
        self._containers: list[dict[str, Any]] = []
        """The dicts of attributes, and those of the tensors and modules in a module."""
        for owner in owners:
            attributes = getattr(owner, "__dict__", {})
            of_tensors_and_modules = {"_parameters", "_buffers", "_modules"} & set(attributes)
            self._containers += [attributes, *[attributes[name] for name in of_tensors_and_modules]]
        self.tensors = _tree.tensors_in(self._containers)
        # What is not copied, because closures, views and identities refer to it.
        same = [*owners, *self._containers, *self.tensors]
        self._memo = {id(item): item for item in same}

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Context manager: every attribute is a deep copy, except tensors, which get their values back afterwards."""
        before = [(container, dict(container)) for container in self._containers]
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
                with contextlib.suppress(RuntimeError):  # an expanded tensor cannot be written
                    tensor.data.copy_(value)
                if tensor.is_leaf:
                    tensor.grad = grad
            for hook in self._hooks:
                hook.values_are_back()
