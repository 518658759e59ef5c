"""An instance of a class that lives for one step: made, given a state, and asked for what it holds.

What a class keeps may be in the instance and in optimizers that it wraps (`holders_of`).
`swap_in_optimizer_params_and_state` of torch.optim (2.13) puts tensors into an instance, too; but it wants a state that
has begun, and what a step assigns anew, numbers among it, is lost.
"""

from __future__ import annotations

from collections import UserDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcamp._optim.class_state import (
    ATTRIBUTE,
    BY_ID,
    BY_PARAM,
    STATE,
    ClassState,
    Form,
    Held,
    entries_in,
    filled,
    held_by,
    holders_of,
    is_plain,
)
from funcamp._optim.compiled_parts import compiled_members, uncompiled
from funcamp._optim.containers import cloned, leaves_of
from funcamp._optim.decisions import Decisions
from funcamp._optim.number import Number


def instance_of(
    cls: type[torch.optim.Optimizer], params: list[Tensor], arguments: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return an instance, in training mode if the class has one (schedule-free classes do).

    Raises:
        TypeError: it has not one parameter group.
        Exception: any error of the constructor.
    """
    optimizer = cls(params, **arguments)
    if len(optimizer.param_groups) != 1:
        raise TypeError(
            f"stateless: {cls.__name__} cannot be made pure: it sorts its parameters into "
            f"{len(optimizer.param_groups)} groups; make one for each group, by_group({...}, group=...)"
        )
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if getattr(optimizer, hooks, None):
            raise TypeError(
                f"stateless: {cls.__name__} cannot be made pure: its constructor registers hooks, which are not called "
                "in a step that is a function; call them in step"
            )
    # Its errors and warnings are for a user's own instance on a GPU; this instance lives for one step.
    optimizer._accelerator_graph_capture_health_check = lambda: None  # type: ignore[method-assign]
    _leave_uncompiled(optimizer)
    train = getattr(optimizer, "train", None)
    if callable(train):
        train()
    return optimizer


def _leave_uncompiled(optimizer: torch.optim.Optimizer) -> None:
    """Give an instance the functions that its class, or its constructor, has compiled, as they were before."""
    cls: Any = type(optimizer)
    for name, member in compiled_members(cls).items():
        setattr(optimizer, name, member.__get__(optimizer))
    for name, value in list(vars(optimizer).items()):
        function = uncompiled(value)
        if function is not None:
            setattr(optimizer, name, function)


def step_of(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Return the step of an instance, without torch's wrapper for hooks and the profiler."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return lambda: step(optimizer)


class _RecordingState(UserDict[str, Any]):
    """A parameter's state that remembers the first value of each key: the state before the first step.

    A `UserDict`, because a dict's own `setdefault` and `update` pass `__setitem__` by.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first_values: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first_values:
            # A clone, because the step goes on to write into the tensor.
            self.first_values[key] = cloned(value)
        super().__setitem__(key, value)


class _RecordingGroup(dict[str, Any]):
    """A parameter group that remembers the value before a first step: of a new key the first one."""

    def __init__(self, group: dict[str, Any]) -> None:
        super().__init__(group)
        self.first_values = {name: cloned(value) for name, value in group.items() if name != "params"}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first_values:
            self.first_values[key] = cloned(value)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


def begin_recording(optimizer: torch.optim.Optimizer) -> None:
    """Make an instance record the first value of everything that it holds."""
    attributes = {name: value for name, value in held_by(optimizer, []).shared.items() if name.startswith(ATTRIBUTE)}

    def recording(constructed: dict[Any, Any]) -> dict[Any, Any]:
        states: dict[Any, Any] = defaultdict(_RecordingState)
        for key, value in constructed.items():
            if isinstance(key, Tensor):
                states[key].update(value)  # torch 2.11's Adagrad fills it in its constructor
            else:
                states[key] = value
        return states

    _replace_states(optimizer, recording)
    for holder in holders_of(optimizer).values():
        group = holder.param_groups[0]
        if not isinstance(group, _RecordingGroup):
            recorded = _RecordingGroup(group)
            for other in holders_of(optimizer).values():
                if other.param_groups[0] is group:
                    other.param_groups[0] = recorded
    first_group: Any = optimizer.param_groups[0]
    first_group.first_values |= {name: cloned(value) for name, value in attributes.items()}


def _replace_states(optimizer: torch.optim.Optimizer, replacement: Callable[[dict[Any, Any]], dict[Any, Any]]) -> None:
    """Replace the states of an instance and of what it wraps; those that were one are one."""
    former: dict[int, tuple[Any, Any]] = {}
    for holder in holders_of(optimizer).values():
        if "state" in vars(holder):  # a wrapper may show the state of what it wraps
            state: Any = holder.state
            if id(state) not in former:
                former[id(state)] = state, replacement(state)
            holder.state = former[id(state)][1]


def first_values(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> Held:
    """Return the first value of everything that an instance holds, which `begin_recording` made it record."""
    leaves: list[dict[str, Any]] = [{} for _ in params]
    shared: dict[str, Any] = {}
    for prefix, holder in reversed(holders_of(optimizer).items()):
        group: Any = holder.param_groups[0]
        shared |= {_prefixed(prefix, name): value for name, value in group.first_values.items()}
        for param, leaf in zip(params, leaves):
            # A class may have put a dict of its own there, of which only the last values are known.
            first = getattr(holder.state.get(param), "first_values", {})
            leaf |= {f"{prefix}{name}": value for name, value in first.items()}
    return Held(leaves, shared)


def _prefixed(prefix: str, name: str) -> str:
    return name if name.startswith(ATTRIBUTE) else f"{prefix}{name}"


def put_state(
    optimizer: torch.optim.Optimizer, params: list[Tensor], state: ClassState, form: Form, decisions: Decisions
) -> None:
    """Give an instance a state, which it may write into."""
    _replace_states(optimizer, lambda _: defaultdict(dict))
    holders = holders_of(optimizer)
    for name, value in filled(form.shared, state.shared, decisions, "its group's").items():
        container, key = _place_of(holders, name)
        container[key] = value
    for param, leaf_form, entries in zip(params, form.leaves, state.leaves):
        if not entries and entries_in(leaf_form):  # it has not taken a step
            continue
        for name, value in filled(leaf_form, entries, decisions, "state").items():
            is_by_param = name.endswith(BY_PARAM)
            if is_by_param or name.endswith(BY_ID):
                shared_name = name.removesuffix(BY_PARAM if is_by_param else BY_ID).replace("/", ".")
                container, key = _place_of(holders, shared_name)
                container[key][param if is_by_param else id(param)] = value
            else:
                prefix = _holder_of(name, holders)
                holders[prefix].state[param][name.removeprefix(prefix)] = value


def _place_of(holders: dict[str, torch.optim.Optimizer], name: str) -> tuple[Any, str]:
    """Return the container of something that all parameters share, and its key there."""
    prefix = _holder_of(name, holders)
    holder, own_name = holders[prefix], name.removeprefix(prefix)
    if own_name.startswith(STATE):
        return holder.state, own_name.removeprefix(STATE)
    if own_name.startswith(ATTRIBUTE):
        return vars(holder), own_name.removeprefix(ATTRIBUTE)
    return holder.param_groups[0], own_name


def _holder_of(name: str, holders: dict[str, torch.optim.Optimizer]) -> str:
    """Return the prefix of the holder of an entry."""
    return max((prefix for prefix in holders if name.startswith(prefix)), key=len)


class Mark(NamedTuple):
    """A number or a tensor, and what differs if it has changed."""

    leaf: Any
    key: tuple[Any, ...]


def marks(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> dict[str, Mark]:
    """Return each number and tensor that all parameters share, by name."""
    found: dict[str, Mark] = {}
    for name, leaf in leaves_of(held_by(optimizer, params).shared).items():
        if isinstance(leaf, Tensor):
            found[name] = Mark(leaf, (id(leaf), leaf._version))
        elif isinstance(leaf, Number):
            found[name] = Mark(leaf, (Number, leaf.key))
        elif is_plain(leaf) or (isinstance(leaf, (set, frozenset)) and all(map(is_plain, leaf))):
            found[name] = Mark(leaf, (type(leaf), repr(leaf)))
    return found


def unfollowed(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return what a step must leave as it is besides its state, by name."""
    found: dict[str, object] = {}
    for prefix, holder in holders_of(optimizer).items():
        found[f"{prefix}param_groups"] = [list(map(id, group["params"])) for group in holder.param_groups]
        found[f"{prefix}defaults"] = repr(holder.defaults)
        hooks = [getattr(holder, name, ()) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")]
        found[f"{prefix}hooks"] = [list(registered) for registered in hooks]
        params = [param for group in holder.param_groups for param in group["params"]]
        found[f"{prefix}attributes of a parameter"] = [sorted(vars(param)) for param in params]
    shared = held_by(optimizer, []).shared
    found["attributes that are no values"] = sorted(name for name, value in shared.items() if not is_plain(value))
    for name, leaf in leaves_of(shared).items():
        if isinstance(leaf, Tensor):
            found[f"the memory of {name} ({id(leaf)})"] = id(leaf.untyped_storage())  # of this very tensor
    return found


def changed(before: dict[str, Mark], after: dict[str, Mark], form: Form | None) -> dict[str, tuple[Any, Any]]:
    """Return what has changed and is not in a form, by name: the value before, None for none, and after."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in {**before, **after}:
        former, mark = before.get(name), after.get(name)
        is_in_form = form is not None and name.partition("[")[0] in form.shared
        if not is_in_form and (former is None or mark is None or former.key != mark.key):
            found[name] = (None if former is None else former.leaf, None if mark is None else mark.leaf)
    return found
