"""An instance of a class that lives for one step: made, filled with a state, and read again.

What it keeps is what `state_dict()` would save, and attributes: `self.state[p]`, its one parameter group, and
attributes as "self.NAME". A leaf of these is a tensor, a number, or a constant.
"""

from __future__ import annotations

import copy
import functools
from collections import UserDict, defaultdict
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._optim.arguments import WITHOUT_EFFECT
from funcamp._optim.foreign.number import ChangingNumber, RefusedError, Run
from funcamp._scaler.state import widen
from funcamp._storage.params import clone
from funcamp._types import Kwargs

#: What an instance keeps, by name: containers of leaves.
Contents: TypeAlias = dict[str, Any]

_CONSTANTS = (int, float, complex, str, type(None), torch.dtype, torch.device)


@functools.cache
def _attributes_of_torch() -> frozenset[str]:
    """Return the names that every optimizer has. Not found at import: the first optimizer imports the compiler."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.1)))


#: In place of a tensor in the form of what an instance keeps; 0.0 is in place of a number that changes.
TENSOR = torch.empty((), device="meta")


class Recorder(UserDict[str, Any]):
    """A parameter's state or group that remembers the first value of each key."""

    def __init__(self, contents: Any = ()) -> None:
        self.first: Contents = {}
        super().__init__(contents)

    def __setitem__(self, key: str, value: Any) -> None:
        self.first.setdefault(key, clone(value))
        super().__setitem__(key, value)


def record(optimizer: Any) -> None:
    """Let an instance remember the first value of each entry."""
    recorders: Any = defaultdict(Recorder)
    recorders.update({param: Recorder(kept) for param, kept in optimizer.state.items()})
    optimizer.state = recorders
    optimizer.param_groups[0] = Recorder(optimizer.param_groups[0])


def recorded_in(optimizer: Any, params: list[Tensor]) -> list[Contents]:
    """Return the first values that were recorded of each parameter, and last those for all."""
    recorders = [*[optimizer.state.get(param) for param in params], optimizer.param_groups[0]]
    return [getattr(recorder, "first", {}) for recorder in recorders]


def instance(cls: type[torch.optim.Optimizer], params: list[Tensor], arguments: Kwargs) -> Any:
    """Return an instance in the mode of training.

    Raises:
        RefusedError: it has several groups, or hooks.
    """
    optimizer: Any = cls(params, **copy.copy(arguments))
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise RefusedError(cls, "it has hooks on its step; write them as parts of a chain")
    if len(optimizer.param_groups) != 1:
        raise RefusedError(cls, "it sorts its parameters into groups; make one for each, with by_group")
    optimizer._accelerator_graph_capture_health_check = lambda: None  # it would warn of capturable=False
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


def step_of(optimizer: Any) -> Callable[[], Any]:
    """Return the step of an instance, without torch's wrapper for hooks and the profiler."""
    step = optimizer.step
    return functools.partial(step.__wrapped__, optimizer) if getattr(step, "hooked", False) else step


def shared_in(optimizer: Any) -> Contents:
    """Return what an instance keeps for all parameters.

    Raises:
        RefusedError: it keeps state that is not of a parameter.
    """
    if not all(isinstance(key, Tensor) for key in optimizer.state):
        raise RefusedError(type(optimizer), "it must have parameters as keys of self.state")
    shared = {name: value for name, value in optimizer.param_groups[0].items() if name not in WITHOUT_EFFECT}
    for name, value in vars(optimizer).items():
        if name != "step" and name not in _attributes_of_torch():
            shared[f"self.{name}"] = value
    return shared


def contents_of(optimizer: Any, params: list[Tensor]) -> list[Contents]:
    """Return what an instance keeps of each parameter, and last what it keeps for all."""
    return [*[dict(optimizer.state.get(param, {})) for param in params], shared_in(optimizer)]


def put_shared(optimizer: Any, contents: Contents) -> None:
    """Give an instance what it keeps for all parameters."""
    for name, value in contents.items():
        if name.startswith("self."):
            setattr(optimizer, name.removeprefix("self."), value)
        else:
            optimizer.param_groups[0][name] = value


def leaves(contents: Contents) -> dict[str, Any]:
    """Return the leaves of containers by name."""
    found: dict[str, Any] = {}
    mapped(found.__setitem__, contents)
    return found


def mapped(fn: Callable[[str, Any], Any], contents: Contents) -> Contents:
    """Return containers like these with fn(name, leaf) in place of each leaf."""
    result: Contents = {}
    for key, value in contents.items():
        if not isinstance(value, (dict, list, tuple)):
            result[key] = fn(key, value)
            continue
        parts, spec = _tree.flatten(value)
        names = [name.replace(".", "_") for name in _tree.names(value)]
        result[key] = _tree.unflatten([fn(f"{key}[{name}]", part) for name, part in zip(names, parts)], spec)
    return result


def is_same(before: object, after: object) -> bool:
    """Return whether a constant is what it was; a tensor and a number only if it is the same object."""
    if before is after:
        return True
    if isinstance(before, (Tensor, ChangingNumber)) or type(before) is not type(after):
        return False
    return bool(before == after)


def changed(before: dict[str, Any], contents: Contents) -> set[str]:
    """Return the names under which something is new or other than it was, by the leaves of before."""
    after = leaves(contents)
    names = before.keys() | after.keys()
    others = {name for name in names if not is_same(before.get(name, NotImplemented), after.get(name, NotImplemented))}
    return {name.partition("[")[0] for name in others}


def form_of(cls: type, contents: Contents) -> Contents:
    """Return what an instance keeps, without values of tensors and of numbers that change.

    Raises:
        RefusedError: it keeps an object, whose changes would not be seen.
    """

    def without_value(name: str, leaf: Any) -> Any:
        if isinstance(leaf, ChangingNumber):
            return 0.0
        if isinstance(leaf, Tensor):
            return TENSOR
        if not isinstance(leaf, _CONSTANTS) and not callable(leaf):
            raise RefusedError(cls, f"it keeps an object as {name}, whose changes are not followed")
        return leaf

    return mapped(without_value, contents)


def is_entry(leaf: object) -> bool:
    """Return whether a leaf is a tensor or a number, which a state has; anything else is a constant."""
    return isinstance(leaf, (Tensor, int, float, ChangingNumber)) and not isinstance(leaf, bool)


def filled(form: Contents, entries: dict[str, Tensor], run: Run) -> Contents:
    """Return containers of a form with the tensors of a state, and with a `ChangingNumber` for each number."""

    def fill(name: str, leaf: Any) -> Any:
        if name not in entries:
            return leaf
        return entries[name].clone() if isinstance(leaf, Tensor) else ChangingNumber(entries[name], run)

    return mapped(fill, form)


def tensor_of(leaf: Any, like: Tensor) -> Tensor:
    """Return a leaf that is a tensor or a number as a tensor."""
    if isinstance(leaf, ChangingNumber):
        return leaf.tensor.to(like.device, copy=True)
    if isinstance(leaf, Tensor):
        return leaf.to(like.device) if leaf.dim() == 0 else leaf
    return torch.full_like(widen(like.new_empty(())), leaf)


def entries_of(contents: Contents, like: Tensor) -> dict[str, Tensor]:
    """Return the tensors and numbers in containers by name, as copies on the device of a tensor."""
    return {name: tensor_of(leaf, like).clone() for name, leaf in leaves(contents).items() if is_entry(leaf)}
