"""Containers in a state: lists, dicts, deques and plain objects, as a tree whose leaves have names."""

from __future__ import annotations

import collections
import sys
import types
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor


def mapped(fn: Callable[[str, object], object], value: object, name: str) -> object:
    """Return a container like value with fn(name, leaf) for each leaf; fn's result for what is no container."""
    if isinstance(value, (dict, collections.UserDict)):
        items_by_key = {key: mapped(fn, item, _inner(name, key)) for key, item in value.items()}
        if isinstance(value, collections.defaultdict):
            return collections.defaultdict(value.default_factory, items_by_key)
        return collections.Counter(items_by_key) if isinstance(value, collections.Counter) else items_by_key
    # Not isinstance: an `Entry`, as any named tuple, is a leaf.
    if type(value) is list or type(value) is tuple or type(value) is collections.deque:
        items = [mapped(fn, item, f"{name}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, collections.deque):
            return collections.deque(items, maxlen=value.maxlen)
        return items if isinstance(value, list) else tuple(items)
    if _is_record(value):
        copied = object.__new__(type(value))
        vars(copied).update({key: mapped(fn, item, f"{name}[{key}]") for key, item in vars(value).items()})
        return copied
    return fn(name, value)


def _inner(name: str, key: object) -> str:
    """Return the name of an item; names of saved tensors are separated by dots, so there is none in its key."""
    key_text = repr(key).replace(".", "_")
    return f"{name}[{key_text}]"


def _is_record(value: object) -> bool:
    """Return whether a value is an object of a package for optimizers, whose attributes are state."""
    kind = type(value)
    is_plain = hasattr(value, "__dict__") and kind.__new__ is object.__new__ and not callable(value)
    if not is_plain or isinstance(value, (Tensor, types.ModuleType, torch.optim.Optimizer)):
        return False
    return kind.__module__.partition(".")[0] not in ("torch", "funcamp", "builtins", *sys.stdlib_module_names)


def _leaves(value: object, name: str) -> Iterator[tuple[str, object]]:
    """Yield the leaves of containers with their names."""
    leaves: list[tuple[str, object]] = []
    mapped(lambda leaf_name, leaf: leaves.append((leaf_name, leaf)), value, name)
    yield from leaves


def leaves_of(contents: Mapping[str, object]) -> dict[str, object]:
    """Return the leaves of what is kept for a parameter, or for all, by name."""
    return {name: leaf for key, value in contents.items() for name, leaf in _leaves(value, key)}


def cloned(value: object) -> object:
    """Return a container with clones of the tensors in it."""
    return mapped(lambda _, leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value, "")
