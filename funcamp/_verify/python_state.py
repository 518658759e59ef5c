"""What a module, a criterion or any function keeps in Python: recorded, compared, and put back.

`verify` runs a model several times from the same start. The model may count its calls, keep a hidden state or write a
tensor in place. `PythonState` records everything of this kind that is reachable from some objects.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from funcamp._verify.compare import is_same

#: At most this many objects are looked at. A model has some ten for each of its modules.
_LIMIT = 200_000
#: Objects that are shared by a process and that no model changes.
_SHARED = (type, types.ModuleType, types.BuiltinFunctionType, torch.dtype, torch.device, torch.layout)
#: Attributes of a module that belong to torch, not to the model.
_OF_TORCH = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook"})


class _Globals(dict[str, Any]):
    """The global variables that a function names: some of the entries of its module's dict."""


class _Place(NamedTuple):
    """An object that can change, its name, and what it contained."""

    name: str
    owner: Any
    contents: Any


class _Values(NamedTuple):
    """A tensor, its name, and everything that a step may change in it."""

    name: str
    tensor: Tensor
    memory: Tensor
    """The tensor's memory at the start; `tensor.data = other` gives the tensor another one."""
    values: Tensor
    grad: Tensor | None
    requires_grad: bool


class PythonState:
    """A record of everything that some objects keep in Python, of their tensors' values, and of their generators.

    Args:
        roots: the objects by name.
    """

    def __init__(self, roots: dict[str, Any]) -> None:
        self._roots = roots
        self._places: list[_Place] = []
        self._tensors: list[_Values] = []
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        self._seen: dict[int, Any] = {}
        """The objects looked at; keeping them keeps their ids."""
        waiting = collections.deque(roots.items())
        while waiting and len(self._seen) < _LIMIT:
            name, value = waiting.popleft()
            if id(value) in self._seen or isinstance(value, _SHARED):
                continue
            self._seen[id(value)] = value
            if isinstance(value, Tensor):
                self._record_tensor(name, value)
            elif isinstance(value, torch.Generator):
                self._generators.append((value, value.get_state()))
            else:
                contents = _contents(value)
                if contents is not None:
                    self._places.append(_Place(name, value, contents))
                if isinstance(value, types.FunctionType) and (named := _globals(value)):
                    self._places.append(_Place(f"{name}'s globals", value.__globals__, named))
            waiting.extend(_inside(name, value))

    def _record_tensor(self, name: str, tensor: Tensor) -> None:
        if tensor.layout != torch.strided or tensor.is_meta or hasattr(type(tensor), "__tensor_flatten__"):
            return
        memory = tensor.data
        grad = tensor.grad if tensor.is_leaf else None
        self._tensors.append(_Values(name, tensor, memory, memory.clone(), grad, tensor.requires_grad))

    def restore(self) -> None:
        """Put everything back as it was recorded."""
        for place in self._places:
            _put_back(place)
        for kept in self._tensors:
            tensor = kept.tensor
            is_elsewhere = tensor.data_ptr() != kept.memory.data_ptr() or tensor.dtype != kept.memory.dtype
            if is_elsewhere or tensor.shape != kept.memory.shape:
                tensor.data = kept.memory
            if not _same_values(kept.memory, kept.values):
                kept.memory.copy_(kept.values)
            if tensor.is_leaf:
                tensor.requires_grad_(kept.requires_grad)
                tensor.grad = kept.grad
        for generator, state in self._generators:
            generator.set_state(state)

    def changes(self) -> dict[str, str]:
        """Return what has changed since the record was made: a description by name.

        Parameters, buffers and gradients are left out, because a step is there to change them.
        """
        now = PythonState(self._roots)
        before = {place.name: place for place in self._places}
        found: dict[str, str] = {}
        for place in now._places:
            old = before.get(place.name)
            if old is not None and old.owner is place.owner:
                found |= _differences(place.name, old.contents, place.contents)
        values_before = {kept.name: kept for kept in self._tensors}
        known = self._registered()
        for kept in now._tensors:
            earlier = values_before.get(kept.name)
            if earlier is None or id(kept.tensor) in known or kept.name in found:
                continue
            if kept.tensor is earlier.tensor and not _same_values(earlier.values, kept.values):
                found[kept.name] = "a tensor that is written in place"
        return found

    def _registered(self) -> set[int]:
        """Return the ids of all parameters and buffers."""
        modules = [value for value in self._seen.values() if isinstance(value, nn.Module)]
        tensors = [t for module in modules for t in (*module._parameters.values(), *module._buffers.values())]
        return {id(tensor) for tensor in tensors}

    def hooks(self) -> list[str]:
        """Return the names of the tensors that have a hook on their gradient."""
        return [
            kept.name
            for kept in self._tensors
            if kept.tensor._backward_hooks or getattr(kept.tensor, "_post_accumulate_grad_hooks", None)
        ]


def _globals(function: types.FunctionType) -> _Globals:
    """Return the global variables that a function names and that may hold state; none for torch's own functions."""
    if (function.__module__ or "").partition(".")[0] in ("torch", "funcamp"):
        return _Globals()
    kinds = (dict, list, set, collections.deque, Tensor, int, float)
    names = [name for name in function.__code__.co_names if isinstance(function.__globals__.get(name), kinds)]
    return _Globals({name: function.__globals__[name] for name in names})


def _contents(value: Any) -> Any:
    """Return a shallow copy of what a container, an object or a function keeps; None if it keeps nothing."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (list, collections.deque)):
        return list(value)
    if isinstance(value, set):
        return set(value)
    if isinstance(value, types.CellType):
        return _cell(value)
    attributes = getattr(value, "__dict__", None)
    return dict(attributes) if type(attributes) is dict else None


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects directly inside another one, with their names."""
    if isinstance(value, nn.Module):
        yield from _inside_module(name, value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"{name}[{key!r}]", item
    elif isinstance(value, (list, tuple, collections.deque)):
        for index, item in enumerate(value):
            yield f"{name}[{index}]", item
    elif isinstance(value, (set, frozenset)):
        for item in value:
            yield f"an item of {name}", item
    elif isinstance(value, types.CellType):
        yield name, _cell(value)
    elif isinstance(value, types.MethodType):
        yield f"{name}.__self__", value.__self__
        yield name, value.__func__
    elif isinstance(value, functools.partial):
        yield name, value.func
        yield f"{name}'s arguments", [*value.args, *value.keywords.values()]
    else:
        if isinstance(value, types.FunctionType):
            for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
                yield f"{variable} (in {name})", cell
            yield f"{name}'s defaults", [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            yield from ((f"{key} (a global variable)", item) for key, item in _globals(value).items())
        attributes = getattr(value, "__dict__", None)
        for key, item in (attributes if type(attributes) is dict else {}).items():
            yield f"{name}.{key}", item


def _inside_module(name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    for tensors in (module._parameters, module._buffers, module._modules):
        yield from ((f"{name}.{key}", item) for key, item in tensors.items())
    yield from ((f"{name}.{key}", item) for key, item in vars(module).items())
    yield f"{name}.forward", type(module).forward


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty: the variable has no value yet
        return None


def _put_back(place: _Place) -> None:
    """Give a container, an object or a closure's cell its recorded contents."""
    owner, contents = place.owner, place.contents
    if isinstance(owner, types.CellType):
        if _cell(owner) is not contents:
            owner.cell_contents = contents
        return
    if isinstance(owner, (list, collections.deque, set)):
        if list(map(id, owner)) != list(map(id, contents)):
            owner.clear()
            (owner.update if isinstance(owner, set) else owner.extend)(contents)
        return
    held = owner if isinstance(owner, dict) else vars(owner)
    if isinstance(contents, _Globals):
        held.update(contents)
    elif list(held) != list(contents) or any(held[key] is not item for key, item in contents.items()):
        held.clear()
        held.update(contents)


def _differences(name: str, before: Any, now: Any) -> dict[str, str]:
    """Describe the differences between the contents of one object at two times."""
    if isinstance(before, dict) and isinstance(now, dict):
        found = {}
        for key in {**before, **now}:
            if key in _OF_TORCH:  # places of their own
                continue
            described = _difference(before.get(key, _ABSENT), now.get(key, _ABSENT))
            if described:
                found[f"{name}.{key}" if isinstance(key, str) and key.isidentifier() else f"{name}[{key!r}]"] = (
                    described
                )
        return found
    if isinstance(before, list) and isinstance(now, list):
        if len(before) != len(now):
            return {name: f"its length changes, from {len(before)} to {len(now)}"}
        pairs = ((index, _difference(old, new)) for index, (old, new) in enumerate(zip(before, now)))
        return {f"{name}[{index}]": described for index, described in pairs if described}
    described = _difference(before, now)
    return {name: described} if described else {}


_ABSENT = object()


def _difference(before: Any, now: Any) -> str:
    """Describe how a value changed; "" if it did not, or if it is an object that is looked at by itself."""
    if before is now or isinstance(now, torch.Size):
        return ""
    if isinstance(now, Tensor) and isinstance(before, Tensor):
        return "" if _same_values(before, now) else "a tensor that is replaced by another"
    plain = (bool, int, float, complex, str, bytes, type(None))
    if isinstance(before, plain) and isinstance(now, plain):
        same = type(before) is type(now) and before == now
        return "" if same else f"a Python value, which changes from {before!r} to {now!r}"
    if type(before) is type(now):
        return ""
    if before is _ABSENT:
        return "it is added"
    return "it is removed" if now is _ABSENT else f"a {type(before).__name__} that becomes a {type(now).__name__}"


def _same_values(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal, also in device. Syncs."""
    if one.layout != torch.strided or one.is_meta or one.device != other.device:
        return one is other
    return is_same(one, other)
