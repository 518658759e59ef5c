"""What an instance of an optimizer's class keeps between steps, as objects of Python, and whether it is as before.

A class keeps it in `self.state[param]`, in its parameter group, and in attributes of `self`: tensors, numbers, and
containers of them. Each has a name, which is its key and the way into a container: `step`, `factors[0]`, `self.total`,
or `optimizer:exp_avg` in an optimizer that it wraps. `class_state.py` turns this into tensors and back.
"""

from __future__ import annotations

import ast
import collections
import enum
import functools
import itertools
import types
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor

from funcamp._optim.compiled_parts import compiled_members
from funcamp._optim.containers import cloned, leaves_of
from funcamp._optim.number import Number

#: What an instance keeps for one parameter, or for all, by name: tensors, numbers, constants, and containers of these.
Contents: TypeAlias = dict[str, object]
#: The kinds of values that become tensors.
Kind = Literal["tensor", "bool", "int", "float"]

_KINDS: dict[type, Kind] = {bool: "bool", int: "int", float: "float"}
#: The kinds from the narrowest: a number that was an int and becomes a float is a float.
_BY_WIDTH: tuple[Kind, ...] = ("bool", "int", "float", "tensor")
#: Constants that are compared by value.
_COMPARED = (str, type(None), torch.Size, torch.dtype, torch.device, frozenset, enum.Enum)
#: How the names of attributes begin, and those of values in `self.state` under a key that is no parameter.
ATTRIBUTE = "self."
STATE = "self.state."
#: How the names of a parameter's values end that are in a dict which all share, under the parameter or its id. They
#: begin with the dict's name, its dots as slashes: exported names separate an entry and a parameter by a dot.
BY_PARAM = "[param]"
BY_ID = "[id]"
#: Of those in a list which all share, at the place of the parameter.
BY_PLACE = "[place]"


class InstanceState(NamedTuple):
    """What an instance keeps, as it is."""

    per_param: list[Contents]
    """`self.state[param]` of each parameter."""
    shared: Contents
    """The parameter group; attributes under names that begin with "self."; `self.state["key"]` as "self.state.key"."""


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


#: Stands for a value that is not there.
MISSING = _Missing()


def with_wrapped(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Return an instance and the optimizers that it and these wrap, by the prefix of their names."""
    optimizers = {"": optimizer}
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        for name, value in vars(optimizers[prefix]).items():
            for inner_prefix, inner in _optimizers_in(f"{prefix}{name}", value):
                if not any(inner is known for known in optimizers.values()):
                    optimizers[inner_prefix] = inner
                    waiting.append(inner_prefix)
    return optimizers


def _optimizers_in(name: str, value: object) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Yield the optimizers that an attribute holds, itself or in a list, with their prefixes."""
    if isinstance(value, torch.optim.Optimizer):
        yield f"{name}:", value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _optimizers_in(f"{name}#{index}", item)
    elif isinstance(value, dict) and not name.endswith("state"):
        for key, item in value.items():
            if isinstance(key, str):
                yield from _optimizers_in(f"{name}#{key}", item)


def read_state(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> InstanceState:
    """Return what an instance keeps, and the optimizers that it wraps."""
    per_param: list[Contents] = [{} for _ in params]
    shared: Contents = {}
    read_ids: set[int] = set()  # a wrapper and what it wraps may have one group and one state
    optimizers = with_wrapped(optimizer)
    for prefix, each_optimizer in optimizers.items():
        group = each_optimizer.param_groups[0]
        if id(group) not in read_ids:
            read_ids.add(id(group))
            shared |= {f"{prefix}{name}": value for name, value in group.items() if name != "params"}
        state = each_optimizer.state
        if id(state) not in read_ids:
            read_ids.add(id(state))
            for param, contents in zip(params, per_param):
                contents |= {f"{prefix}{name_of_key(key)}": value for key, value in state.get(param, {}).items()}
            other_keys = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
            shared |= {f"{prefix}{STATE}{name_of_key(key)}": value for key, value in other_keys.items()}
    for prefix, each_optimizer in optimizers.items():
        cls: type = type(each_optimizer)
        not_state = _attributes_of_every_instance() | compiled_members(cls).keys()
        for name, value in vars(each_optimizer).items():
            if name not in not_state and not any(_optimizers_in(name, value)):
                shared[f"{prefix}{ATTRIBUTE}{name}"] = value
    _move_to_params(shared, per_param, params)
    return InstanceState(per_param, shared)


def is_attribute(name: str) -> bool:
    """Return whether something that all parameters share is an attribute, of an instance or of what it wraps."""
    return name.startswith(ATTRIBUTE) or f":{ATTRIBUTE}" in name


def name_of_key(key: object) -> str:
    """Return the name of a key in a state: a text as it is, any other in angle brackets."""
    return key if isinstance(key, str) and not key.startswith("<") else f"<{key!r}>"


def key_in_state(name: str) -> object:
    """Return the key of which `name_of_key` gives the name.

    Raises:
        TypeError: it is no number, text or None, and no tuple of these.
    """
    if not name.startswith("<"):
        return name
    try:
        return ast.literal_eval(name[1:-1])
    except (ValueError, SyntaxError):
        raise TypeError(
            f"stateless: self.state must have parameters, numbers or text as keys; got {name[1:-1]}"
        ) from None


def _move_to_params(shared: Contents, per_param: list[Contents], params: list[Tensor]) -> None:
    """Move what shared dicts have under a parameter, or under its id, to the contents of this parameter.

    Also the items of a list that has a tensor like each parameter at its place.
    """
    contents_of = {id(param): contents for param, contents in zip(params, per_param)}
    for name, value in list(shared.items()):
        exported_name = name.replace(".", "/")
        if _is_like(value, params):
            del shared[name]
            for contents, item in zip(per_param, value):
                contents[f"{exported_name}{BY_PLACE}"] = item
        if not isinstance(value, dict):
            continue
        remaining: dict[object, object] = {}
        for key, item in value.items():
            if isinstance(key, Tensor) and id(key) in contents_of:
                contents_of[id(key)][f"{exported_name}{BY_PARAM}"] = item
            elif type(key) is int and key in contents_of:
                contents_of[key][f"{exported_name}{BY_ID}"] = item
            else:
                remaining[key] = item
        if len(remaining) < len(value):
            shared[name] = remaining


def _is_like(value: object, params: list[Tensor]) -> TypeGuard[list[Tensor]]:
    """Return whether a value is a list with a tensor of the shape of each parameter."""
    if type(value) is not list or not value or len(value) != len(params):
        return False
    return all(isinstance(item, Tensor) and item.shape == param.shape for item, param in zip(value, params))


@functools.cache
def _attributes_of_every_instance() -> frozenset[str]:
    """Return the attributes that every optimizer has. Making one imports torch._dynamo."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1)))


def snapshot(state: InstanceState) -> InstanceState:
    """Return a copy that later steps do not change."""
    per_param = [{name: cloned(value) for name, value in contents.items()} for contents in state.per_param]
    return InstanceState(per_param, {name: cloned(value) for name, value in state.shared.items()})


def aliases_in(state: InstanceState, params: list[Tensor]) -> set[frozenset[str]]:
    """Return the names of the tensors that are in one memory, two by two; a parameter is "the parameter"."""
    names_in: dict[int, list[str]] = collections.defaultdict(list)
    named: list[tuple[str, object]] = [("the parameter", param) for param in params]
    for contents in (*state.per_param, state.shared):
        named += leaves_of(contents).items()
    for name, value in named:
        if isinstance(value, Tensor):
            names_in[value.untyped_storage()._cdata].append(name)
    return {frozenset(pair) for names in names_in.values() for pair in itertools.combinations(names, 2)}


def container_of(name: str) -> str:
    """Return the name of the container that has a leaf: of "factors[0]" it is "factors"; of no container the name."""
    return name.partition("[")[0]


# Comparisons.


def kind_of(value: object) -> Kind | None:
    """Return the kind of a value that may become a tensor; None for a constant of another kind."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, Number):
        return "float"
    return _KINDS.get(type(value))


def wider(kind: Kind | None, other: Kind) -> Kind:
    """Return the wider of two kinds."""
    return other if kind is None else max(kind, other, key=_BY_WIDTH.index)


def is_plain(value: object) -> bool:
    """Return whether a value consists of numbers, tensors and text, which can be compared."""
    leaves = leaves_of({"": value}).values()
    return all(isinstance(leaf, _COMPARED) or kind_of(leaf) is not None for leaf in leaves)


def is_unchanged(before: object, after: object) -> bool:
    """Return whether a value consists of the same leaves as before; tensors are compared by shape if they are meta."""
    leaves, later_leaves = leaves_of({"": before}), leaves_of({"": after})
    return leaves.keys() == later_leaves.keys() and all(same(leaf, later_leaves[name]) for name, leaf in leaves.items())


def same(before: object, after: object) -> bool:
    """Return whether a leaf, a value that is no container, is as before."""
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return _is_same_tensor(before, after)
    if type(before) is not type(after):
        return False
    if type(before) in _KINDS:
        are_nan = before != before and after != after
        return before == after or are_nan
    if isinstance(before, _COMPARED):
        return bool(before == after)
    # A method or a function that is made anew, as a lambda in a step is, has the same code.
    if isinstance(before, types.MethodType) and isinstance(after, types.MethodType):
        return before.__func__ is after.__func__
    if isinstance(before, types.FunctionType) and isinstance(after, types.FunctionType):
        return before.__code__ is after.__code__
    return before is after


def _is_same_tensor(before: Tensor, after: Tensor) -> bool:
    """Return whether a tensor is as before; without values by its shape and dtype."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    return before.is_meta or after.is_meta or torch.equal(before, after)
