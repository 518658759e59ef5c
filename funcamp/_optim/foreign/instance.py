"""An instance of a class that lives for one step: made, filled with a state, and read again.

What it keeps is what `state_dict()` would save, and attributes: `self.state[p]`, its one parameter group, text keys of
`self.state` as "state.NAME", and attributes as "self.NAME". A leaf of these is a tensor, a number, or a constant.
"""

from __future__ import annotations

import copy
import functools
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from funcamp import _tree
from funcamp._optim.arguments import WITHOUT_EFFECT
from funcamp._optim.arithmetic import wide
from funcamp._optim.foreign.number import Number, RefusedError, Run
from funcamp._types import Kwargs

#: What an instance keeps, by name: containers of leaves.
Contents: TypeAlias = dict[str, Any]

_CONSTANTS = (int, float, complex, str, type(None), torch.dtype, torch.device, type, nn.Module)


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
        self.first.setdefault(key, cloned(value))
        super().__setitem__(key, value)


def record(optimizer: Any) -> None:
    """Let an instance remember the first value of each entry."""
    recorders: Any = defaultdict(Recorder)
    for key, kept in optimizer.state.items():
        recorders[key] = Recorder(kept) if isinstance(key, Tensor) else kept
    optimizer.state = recorders
    optimizer.param_groups[0] = Recorder(optimizer.param_groups[0])


def instance(cls: type[torch.optim.Optimizer], params: list[Tensor], arguments: Kwargs) -> Any:
    """Return an instance in the mode of training.

    Raises:
        RefusedError: it keeps what is not followed.
    """
    optimizer: Any = cls(params, **copy.copy(arguments))
    if len(optimizer.param_groups) != 1:
        raise refusal(cls, "it sorts its parameters into groups; make one for each, with by_group")
    check_constants(cls, shared_in(optimizer))
    optimizer._accelerator_graph_capture_health_check = lambda: None  # it would warn of capturable=False
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    return optimizer


def refusal(cls: type, why: str, *remedies: str) -> RefusedError:
    """Return the error for a class that cannot be a function, or not without some remedies."""
    error = RefusedError(f"stateless: {cls.__name__} cannot be made pure: {why}")
    error.remedies = frozenset(remedies)
    return error


def check_constants(cls: type, contents: Contents) -> None:
    """Raise RefusedError for an object whose changes would not be seen."""
    for name, value in contents.items():
        for leaf in _tree.leaves(value):
            if not isinstance(leaf, (Tensor, Number, *_CONSTANTS)) and not callable(leaf):
                raise refusal(cls, f"it keeps an object as {name}, whose changes are not followed")


def step_of(optimizer: Any) -> Callable[[], Any]:
    """Return the step of an instance, without torch's wrapper for hooks and the profiler."""
    step = optimizer.step
    return functools.partial(step.__wrapped__, optimizer) if getattr(step, "hooked", False) else step


def shared_in(optimizer: Any) -> Contents:
    """Return what an instance keeps for all parameters.

    Raises:
        RefusedError: it keeps state that is neither of a parameter nor under a text.
    """
    shared = {name: value for name, value in optimizer.param_groups[0].items() if name not in WITHOUT_EFFECT}
    for key, value in optimizer.state.items():
        if isinstance(key, str):
            shared[f"state.{key}"] = value
        elif not isinstance(key, Tensor):
            raise refusal(type(optimizer), "it must have parameters or text as keys of self.state")
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
        place, _, key = name.partition(".")
        if place == "self" and key:
            setattr(optimizer, key, value)
        elif place == "state" and key:
            optimizer.state[key] = value
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
        names = [f"{key}{_tree.path_of(value, index).replace('.', '_')}" for index in range(len(parts))]
        result[key] = _tree.unflatten([fn(name, part) for name, part in zip(names, parts)], spec)
    return result


def is_number(leaf: object) -> bool:
    """Return whether a leaf is a number, which may change."""
    return isinstance(leaf, (int, float, Number)) and not isinstance(leaf, bool)


def is_same(before: object, after: object) -> bool:
    """Return whether a constant is what it was; a tensor and a number only if it is the same object."""
    if before is after:
        return True
    if isinstance(before, (Tensor, Number)) or type(before) is not type(after):
        return False
    return bool(before == after)


_NOTHING = (NotImplemented, None)


def marked(contents: Contents) -> dict[str, tuple[Any, int | None]]:
    """Return the leaves of containers by name, each with a number that a write into a tensor changes."""
    marks = {}
    for name, leaf in leaves(contents).items():
        marks[name] = leaf, leaf._version if isinstance(leaf, Tensor) else None
    return marks


def changed(before: dict[str, tuple[Any, int | None]], contents: Contents) -> set[str]:
    """Return the names under which something is new or other, or was written into, since it was marked."""
    after = marked(contents)
    names = set()
    for name in before.keys() | after.keys():
        (old, old_version), (new, new_version) = before.get(name, _NOTHING), after.get(name, _NOTHING)
        if old_version != new_version or not is_same(old, new):
            names.add(name.partition("[")[0])
    return names


def form_of(contents: Contents) -> Contents:
    """Return what an instance keeps, without values of tensors and of numbers that change."""

    def without_value(_: str, leaf: Any) -> Any:
        if isinstance(leaf, Number):
            return 0.0
        return TENSOR if isinstance(leaf, Tensor) else leaf

    return mapped(without_value, contents)


def is_entry(leaf: object) -> bool:
    """Return whether a leaf is a tensor or a number, which a state has; anything else is a constant."""
    return isinstance(leaf, Tensor) or is_number(leaf)


def filled(form: Contents, entries: dict[str, Tensor], run: Run) -> Contents:
    """Return containers of a form with the tensors of a state, and with a `Number` for each number."""

    def fill(name: str, leaf: Any) -> Any:
        if name not in entries:
            return leaf
        return entries[name].clone() if isinstance(leaf, Tensor) else Number(entries[name], run)

    return mapped(fill, form)


def tensor_of(leaf: Any, like: Tensor) -> Tensor:
    """Return a leaf that is a tensor or a number as a tensor."""
    if isinstance(leaf, Number):
        return leaf.tensor.to(like.device, copy=True)
    if isinstance(leaf, Tensor):
        return leaf.to(like.device) if leaf.dim() == 0 else leaf
    return torch.full_like(wide(like.new_empty(())), leaf)


def check_aliases(cls: type, values: Iterable[object]) -> None:
    """Raise RefusedError if two tensors of a state share memory."""
    storages = [value.untyped_storage()._cdata for value in values if isinstance(value, Tensor)]
    if len(set(storages)) < len(storages):
        raise refusal(cls, "it keeps one tensor under two names; clone it")


def cloned(value: Any) -> Any:
    """Return containers with clones of their tensors."""
    parts, spec = _tree.flatten(value)
    return _tree.unflatten([part.clone() if isinstance(part, Tensor) else part for part in parts], spec)
