"""What a module, a criterion or any function keeps in Python: recorded, compared, and put back.

`verify` runs a model several times from the same start. The model may count its calls, keep a hidden state or write a
tensor in place. `PythonState` records everything of this kind that `survey` finds behind some objects.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from funcamp._trace.python_state import NUMBERS, Slot, survey
from funcamp._verify.compare import is_same

#: Containers whose items can be put back. A subclass may do anything when an item is read or set.
_CONTAINERS = (
    dict,
    list,
    set,
    collections.deque,
    collections.OrderedDict,
    collections.defaultdict,
    collections.Counter,
)


class _Contents(NamedTuple):
    """A container or an object with attributes, and what was in it."""

    owner: Any
    items: Any


class _Values(NamedTuple):
    """A tensor, and everything that a step may change in it."""

    tensor: Tensor
    memory: Tensor
    """The tensor's memory at the start; `tensor.data = other` gives the tensor another one."""
    values: Tensor
    grad: Tensor | None
    requires_grad: bool


class PythonState:
    """A record of what some objects keep in Python, of their tensors' values, and of their generators.

    Args:
        roots: the objects by name.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots = roots
        self._slots: dict[str, Slot] = survey(roots)
        self._contents: list[_Contents] = []
        self._tensors: dict[int, _Values] = {}
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        seen: set[int] = set()
        for slot in self._slots.values():
            if id(slot.value) not in seen:
                seen.add(id(slot.value))
                self._record(slot.value)

    def _record(self, value: Any) -> None:
        if isinstance(value, Tensor):
            if value.layout == torch.strided and not value.is_meta and not hasattr(type(value), "__tensor_flatten__"):
                memory = value.data
                grad = value.grad if value.is_leaf else None
                self._tensors[id(value)] = _Values(value, memory, memory.clone(), grad, value.requires_grad)
        elif isinstance(value, torch.Generator):
            self._generators.append((value, value.get_state()))
        elif type(value) in _CONTAINERS:
            self._contents.append(_Contents(value, value.copy()))
        elif not isinstance(value, (type, *NUMBERS)):
            attributes = getattr(value, "__dict__", None)
            if type(attributes) is dict:
                self._contents.append(_Contents(attributes, attributes.copy()))
        if isinstance(value, nn.Module):
            for held in (value._parameters, value._buffers, value._modules):
                self._contents.append(_Contents(held, held.copy()))

    def restore(self) -> None:
        """Put everything back as it was recorded."""
        for contents in self._contents:
            _put_back(contents)
        for slot in self._slots.values():
            if _is_variable(slot) and slot.now() is not slot.value:
                slot.put(slot.value)
        for kept in self._tensors.values():
            _restore_tensor(kept)
        for generator, state in self._generators:
            generator.set_state(state)

    def changes(self) -> dict[str, str]:
        """Return what has changed since the record was made: a description by name.

        The model's parameters and buffers are left out, because a step is there to change them.
        """
        trained = self._of_model()
        found: dict[str, str] = {}
        for path, slot in survey(self._roots).items():
            before = self._slots.get(path)
            described = "" if before is None else self._difference(before.value, slot.value)
            if described and id(slot.value) not in trained:
                found[path] = described
        return found

    def _difference(self, before: Any, now: Any) -> str:
        """Describe how a value changed; "" if it did not, or if its parts are looked at by themselves."""
        if isinstance(now, Tensor) and isinstance(before, Tensor):
            if now is not before:
                return "" if _same_values(before, now) else "a tensor that is replaced by another"
            kept = self._tensors.get(id(now))
            written = kept is not None and not _same_values(kept.values, now)
            return "a tensor that is written in place" if written else ""
        if isinstance(before, NUMBERS) and isinstance(now, NUMBERS):
            same = type(before) is type(now) and before == now
            return "" if same else f"a Python value, which changes from {before!r} to {now!r}"
        if type(before) is not type(now):
            return f"a {type(before).__name__} that becomes a {type(now).__name__}"
        if isinstance(before, (list, collections.deque)):
            length = next((len(one.items) for one in self._contents if one.owner is now), len(now))
            return "" if length == len(now) else f"a {type(now).__name__} that goes from {length} to {len(now)} items"
        return ""

    def _of_model(self) -> set[int]:
        """Return the ids of the parameters and buffers of the object called "model"."""
        model = self._roots.get("model")
        tensors = (*model.parameters(), *model.buffers()) if isinstance(model, nn.Module) else ()
        return {id(tensor) for tensor in tensors}

    def hooks(self) -> list[str]:
        """Return the names of the tensors that have a hook on their gradient."""
        return [
            path
            for path, slot in self._slots.items()
            if isinstance(slot.value, Tensor)
            and (slot.value._backward_hooks or getattr(slot.value, "_post_accumulate_grad_hooks", None))
        ]


def _is_variable(slot: Slot) -> bool:
    """Return whether a slot is a variable of a closure, a class or a module of Python, or one of `__slots__`."""
    if isinstance(slot.owner, dict):
        return "__builtins__" in slot.owner
    return slot.owner is not None and not isinstance(slot.owner, (list, collections.deque))


def _put_back(contents: _Contents) -> None:
    owner, items = contents
    if isinstance(owner, dict):
        if list(owner) != list(items) or any(owner[key] is not item for key, item in items.items()):
            owner.clear()
            owner.update(items)
    elif list(map(id, owner)) != list(map(id, items)):
        owner.clear()
        if isinstance(owner, set):
            owner.update(items)
        else:
            owner.extend(items)


def _restore_tensor(kept: _Values) -> None:
    tensor, memory = kept.tensor, kept.memory
    place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    if place != (memory.data_ptr(), memory.shape, memory.stride(), memory.dtype):
        tensor.data = memory
    if not _same_values(memory, kept.values):
        memory.copy_(kept.values)
    if tensor.is_leaf:
        tensor.requires_grad_(kept.requires_grad)
        tensor.grad = kept.grad


def _same_values(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal, also in device. Syncs."""
    if one.layout != torch.strided or one.is_meta or one.device != other.device:
        return one is other
    return is_same(one, other)
