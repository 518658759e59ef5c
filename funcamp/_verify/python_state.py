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


class _ContainerRecord(NamedTuple):
    """A container, or the dict of an object's attributes, and a copy with what was in it."""

    container: Any
    items: Any


class _TensorRecord(NamedTuple):
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

    def __init__(self, roots: Mapping[str, object]) -> None:
        self._roots = roots
        self._slots: dict[str, Slot] = survey(roots)
        self._containers: list[_ContainerRecord] = []
        self._tensors: dict[int, _TensorRecord] = {}
        """By the id of the tensor."""
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        seen: set[int] = set()
        for slot in self._slots.values():
            if id(slot.value) not in seen:
                seen.add(id(slot.value))
                self._record(slot.value)

    def _record(self, value: object) -> None:
        """Record what is in a value that is reached from the roots."""
        if isinstance(value, Tensor):
            if _has_values(value):
                memory = value.data
                grad = value.grad if value.is_leaf else None
                self._tensors[id(value)] = _TensorRecord(value, memory, memory.clone(), grad, value.requires_grad)
        elif isinstance(value, torch.Generator):
            self._generators.append((value, value.get_state()))
        elif type(value) in _CONTAINERS:
            self._record_container(value)
        elif not isinstance(value, (type, *NUMBERS)):
            attributes = getattr(value, "__dict__", None)
            if type(attributes) is dict:
                self._record_container(attributes)
        if isinstance(value, nn.Module):
            for tensors_or_modules in (value._parameters, value._buffers, value._modules):
                self._record_container(tensors_or_modules)

    def _record_container(self, container: Any) -> None:
        self._containers.append(_ContainerRecord(container, container.copy()))

    def restore(self) -> None:
        """Put everything back as it was recorded."""
        for container_record in self._containers:
            _restore_container(container_record)
        for slot in self._slots.values():
            if _is_variable(slot) and slot.now() is not slot.value:
                slot.put(slot.value)
        for tensor_record in self._tensors.values():
            _restore_tensor(tensor_record)
        for generator, state in self._generators:
            generator.set_state(state)

    def changes(self) -> dict[str, str]:
        """Return what has changed since the record was made: a description by name.

        The model's parameters and buffers are left out, because a step is there to change them.
        """
        ids_of_model = self._ids_of_model_tensors()
        changes: dict[str, str] = {}
        for path, slot in survey(self._roots).items():
            before = self._slots.get(path)
            if before is None:
                continue
            difference = self._difference(before.value, slot.value)
            if difference and id(slot.value) not in ids_of_model:
                changes[path] = difference
        return changes

    def _difference(self, before: Any, now: Any) -> str:
        """Describe how a value changed; "" if it did not, or if its parts are looked at by themselves."""
        if isinstance(now, Tensor) and isinstance(before, Tensor):
            return self._tensor_difference(before, now)
        if isinstance(before, NUMBERS) and isinstance(now, NUMBERS):
            is_equal = type(before) is type(now) and before == now
            return "" if is_equal else f"a Python value, which changes from {before!r} to {now!r}"
        if type(before) is not type(now):
            return f"a {type(before).__name__} that becomes a {type(now).__name__}"
        if isinstance(before, (list, collections.deque)):
            recorded = next((record for record in self._containers if record.container is now), None)
            length = len(now) if recorded is None else len(recorded.items)
            return "" if length == len(now) else f"a {type(now).__name__} that goes from {length} to {len(now)} items"
        return ""

    def _tensor_difference(self, before: Tensor, now: Tensor) -> str:
        """Describe how a tensor changed; "" if it did not."""
        if now is not before:
            return "" if _same_values(before, now) else "a tensor that is replaced by another"
        record = self._tensors.get(id(now))
        is_written = record is not None and not _same_values(record.values, now)
        return "a tensor that is written in place" if is_written else ""

    def _ids_of_model_tensors(self) -> set[int]:
        """Return the ids of the parameters and buffers of the object called "model"."""
        model = self._roots.get("model")
        if not isinstance(model, nn.Module):
            return set()
        return {id(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def hooks(self) -> list[str]:
        """Return the names of the tensors that have a hook on their gradient."""
        return [path for path, slot in self._slots.items() if _has_hook(slot.value)]


def _has_hook(value: object) -> bool:
    if not isinstance(value, Tensor):
        return False
    return bool(value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None))


def _has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has memory that can be copied: not a sparse or meta tensor, nor a subclass."""
    is_wrapper = hasattr(type(tensor), "__tensor_flatten__")
    return tensor.layout == torch.strided and not tensor.is_meta and not is_wrapper


def _is_variable(slot: Slot) -> bool:
    """Return whether a slot is a variable of a closure, a class or a module of Python, or one of `__slots__`."""
    if isinstance(slot.owner, dict):
        return "__builtins__" in slot.owner
    return slot.owner is not None and not isinstance(slot.owner, (list, collections.deque))


def _restore_container(record: _ContainerRecord) -> None:
    """Put back what was in a container, if it has something else now."""
    container, items = record
    if isinstance(container, dict):
        has_changed = list(container) != list(items) or any(container[key] is not item for key, item in items.items())
        if has_changed:
            container.clear()
            container.update(items)
    elif list(map(id, container)) != list(map(id, items)):
        container.clear()
        if isinstance(container, set):
            container.update(items)
        else:
            container.extend(items)


def _restore_tensor(record: _TensorRecord) -> None:
    """Put back the memory of a tensor, its values, its gradient and whether it requires one."""
    tensor = record.tensor
    memory = record.memory
    if _place(tensor) != _place(memory):
        tensor.data = memory
    if not _same_values(memory, record.values):
        memory.copy_(record.values)
    if tensor.is_leaf:
        tensor.requires_grad_(record.requires_grad)
        tensor.grad = record.grad


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Return where a tensor is in memory, and in which form."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _same_values(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal, also in device. Syncs."""
    if one.layout != torch.strided or one.is_meta or one.device != other.device:
        return one is other
    return is_same(one, other)
