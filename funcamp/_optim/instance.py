"""An instance of a class that lives for one step: made, given a state, and observed for what it changes.

What a class keeps may be in the instance and in optimizers that it wraps (`with_wrapped`).
`swap_in_optimizer_params_and_state` of torch.optim (2.13) puts tensors into an instance, too; but it wants a state that
has begun, and what a step assigns anew, numbers among it, is lost.
"""

from __future__ import annotations

from collections import UserDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcamp._optim.class_state import ClassState, Form, entries_in, filled
from funcamp._optim.compiled_parts import compiled_members, uncompiled
from funcamp._optim.containers import cloned, leaves_of
from funcamp._optim.decisions import Decisions
from funcamp._optim.instance_state import (
    ATTRIBUTE,
    BY_ID,
    BY_PARAM,
    BY_PLACE,
    STATE,
    Contents,
    InstanceState,
    container_of,
    is_attribute,
    is_plain,
    key_in_state,
    name_of_key,
    read_state,
    with_wrapped,
)
from funcamp._optim.number import Number
from funcamp._types import Kwargs

#: `self.state` of an instance: by parameter, and by other keys.
_States: TypeAlias = dict[Any, Any]
#: Where an optimizer keeps the hooks of its step.
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def instance_of(
    cls: type[torch.optim.Optimizer], params: list[Tensor], arguments: Kwargs, *, remembers: bool = False
) -> torch.optim.Optimizer:
    """Return an instance, in training mode if the class has one (schedule-free classes do).

    Args:
        cls: the class.
        params: its parameters.
        arguments: its other arguments.
        remembers: whether it finds results of former steps in its tables (`_ForgetfulTable`), as in its own loop.

    Raises:
        TypeError: it has not one parameter group.
        Exception: any error of the constructor.
    """
    optimizer = cls(params, **arguments)
    if len(optimizer.param_groups) != 1:
        raise TypeError(
            f"stateless: {cls.__name__} cannot be made pure: it sorts its parameters into "
            f"{len(optimizer.param_groups)} groups; make one for each group, by_group({{...}}, group=...)"
        )
    for hooks in _HOOKS:
        if getattr(optimizer, hooks, None):
            raise TypeError(
                f"stateless: {cls.__name__} cannot be made pure: its constructor registers hooks, which are not called "
                "in a step that is a function; call them in step"
            )
    # Its errors and warnings are for a user's own instance on a GPU; this instance lives for one step.
    optimizer._accelerator_graph_capture_health_check = lambda: None  # type: ignore[method-assign]
    _leave_uncompiled(optimizer)
    if not remembers:
        _forget_tables(optimizer)
    train = getattr(optimizer, "train", None)
    if callable(train):
        train()
    return optimizer


def _leave_uncompiled(optimizer: torch.optim.Optimizer) -> None:
    """Give an instance the functions that its class, or its constructor, has compiled, as they were before."""
    cls: type = type(optimizer)
    for name, member in compiled_members(cls).items():
        setattr(optimizer, name, member.__get__(optimizer))
    for name, value in list(vars(optimizer).items()):
        function = uncompiled(value)
        if function is not None:
            setattr(optimizer, name, function)


class _ForgetfulTable(list[list[None]]):
    """A table in which a class looks up by the step's number what it has computed: it never finds anything.

    Many classes rectify so: RAdam has `buffer=[[None, None, None] for _ in range(10)]` in its group. Python cannot take
    a place in a list by a number that is a tensor, and a result that is not found is computed again. A class that keeps
    more than results there comes to other numbers than its own loop, and is refused by the long trial.
    """

    def __getitem__(self, _: object) -> Any:
        return [None] * len(next(iter(self)))


def _forget_tables(optimizer: torch.optim.Optimizer) -> None:
    """Replace the tables of an instance that are empty when it is made."""
    containers: list[dict[str, Any]] = [optimizer.param_groups[0], vars(optimizer)]
    for container in containers:
        for name, value in container.items():
            if _is_empty_table(value):
                container[name] = _ForgetfulTable(value)


def _is_empty_table(value: object) -> bool:
    """Return whether a value is a list of lists of None."""
    if type(value) is not list or not value:
        return False
    return all(type(row) is list and row and all(item is None for item in row) for row in value)


def step_of(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """Return the step of an instance, without torch's wrapper for hooks and the profiler."""
    if "step" in vars(optimizer):  # its constructor has chosen one
        return vars(optimizer)["step"]  # type: ignore[no-any-return]
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return lambda: step(optimizer)


def set_in_group(optimizer: torch.optim.Optimizer, values: Mapping[str, object]) -> None:
    """Set numbers in the parameter group of an instance, as a scheduler of torch does; the constructor's remain."""
    group = optimizer.param_groups[0]
    for name, value in values.items():
        if isinstance(value, Number) and isinstance(group.get(name), Tensor):
            value = value.tensor.to(group[name].dtype)
        group[name] = value


# The first values of what a step makes: the state before the first step.


class _RecordingState(UserDict[str, object]):
    """A parameter's state that remembers the first value of each key: the state before the first step.

    A `UserDict`, because a dict's own `setdefault` and `update` pass `__setitem__` by.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first_values: Contents = {}

    def __setitem__(self, key: str, value: object) -> None:
        if key not in self.first_values:
            # A clone, because the step goes on to write into the tensor.
            self.first_values[key] = cloned(value)
        super().__setitem__(key, value)


class _RecordingGroup(dict[str, object]):
    """A parameter group that remembers the value before a first step: of a new key the first one."""

    def __init__(self, group: Kwargs) -> None:
        super().__init__(group)
        self.first_values: Contents = {name: cloned(value) for name, value in group.items() if name != "params"}

    def __setitem__(self, key: str, value: object) -> None:
        if key not in self.first_values:
            self.first_values[key] = cloned(value)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: object = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


def begin_recording(optimizer: torch.optim.Optimizer) -> None:
    """Make an instance record the first value of everything that it keeps."""
    shared = read_state(optimizer, []).shared
    attributes = {name: cloned(value) for name, value in shared.items() if is_attribute(name)}
    _replace_states(optimizer, _recording_states)
    optimizers = with_wrapped(optimizer).values()
    for each_optimizer in optimizers:
        group = each_optimizer.param_groups[0]
        if isinstance(group, _RecordingGroup):
            continue
        recording_group = _RecordingGroup(group)
        for other_optimizer in optimizers:  # a wrapper and what it wraps may have one group
            if other_optimizer.param_groups[0] is group:
                other_optimizer.param_groups[0] = recording_group
    first_group = optimizer.param_groups[0]
    assert isinstance(first_group, _RecordingGroup)
    first_group.first_values |= attributes


def _recording_states(constructed: _States) -> _States:
    """Return states that record, with what the constructor has put there."""
    states: _States = defaultdict(_RecordingState)
    for key, value in constructed.items():
        if isinstance(key, Tensor):
            states[key].update(value)  # torch 2.11's Adagrad fills it in its constructor
        else:
            states[key] = value
    return states


def _replace_states(optimizer: torch.optim.Optimizer, replacement: Callable[[_States], _States]) -> None:
    """Replace the states of an instance and of what it wraps; those that were one remain one."""
    replaced: dict[int, tuple[_States, _States]] = {}  # with the former ones, so that their ids stay theirs
    for each_optimizer in with_wrapped(optimizer).values():
        if "state" in vars(each_optimizer):  # a wrapper may show the state of what it wraps
            state: _States = each_optimizer.state
            if id(state) not in replaced:
                replaced[id(state)] = state, replacement(state)
            each_optimizer.state = replaced[id(state)][1]  # type: ignore[assignment]  # torch: a defaultdict


def first_values(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> InstanceState:
    """Return the first value of everything that an instance keeps, which `begin_recording` made it record."""
    per_param: list[Contents] = [{} for _ in params]
    shared: Contents = {}
    for prefix, each_optimizer in reversed(with_wrapped(optimizer).items()):
        group: Any = each_optimizer.param_groups[0]
        shared |= {_prefixed(prefix, name): value for name, value in group.first_values.items()}
        for param, contents in zip(params, per_param):
            # A class may have replaced the recording state by a dict, of which only the last values are known.
            first = getattr(each_optimizer.state.get(param), "first_values", {})
            contents |= {f"{prefix}{name_of_key(key)}": value for key, value in first.items()}
    return InstanceState(per_param, shared)


def _prefixed(prefix: str, name: str) -> str:
    return name if is_attribute(name) else f"{prefix}{name}"


# Putting a state into an instance.


def put_state(
    optimizer: torch.optim.Optimizer, params: list[Tensor], state: ClassState, form: Form, decisions: Decisions
) -> None:
    """Give an instance a state, which it may write into."""
    _replace_states(optimizer, lambda _: defaultdict(dict))
    optimizers = with_wrapped(optimizer)
    for name, value in filled(form.shared, state.shared, decisions, "its group's").items():
        container, key = _dict_and_key(name, optimizers)
        container[key] = value
    for place, (param, param_form, entries) in enumerate(zip(params, form.per_param, state.per_param)):
        if not entries and entries_in(param_form):  # it has not taken a step
            continue
        for name, value in filled(param_form, entries, decisions, "state").items():
            container, key = _container_and_key_of(place, param, name, optimizers)
            container[key] = value


def _container_and_key_of(
    place: int, param: Tensor, name: str, optimizers: dict[str, torch.optim.Optimizer]
) -> tuple[Any, object]:
    """Return the dict or list that has something of one parameter, and its key there."""
    if name.endswith(BY_PLACE):
        container, key = _dict_and_key(name.removesuffix(BY_PLACE).replace("/", "."), optimizers)
        items = container.setdefault(key, [])
        items += [None] * (place + 1 - len(items))  # a class may make the list in its first step
        return items, place
    is_by_param = name.endswith(BY_PARAM)
    if is_by_param or name.endswith(BY_ID):
        shared_name = name.removesuffix(BY_PARAM if is_by_param else BY_ID).replace("/", ".")
        container, key = _dict_and_key(shared_name, optimizers)
        return container[key], param if is_by_param else id(param)
    prefix = _prefix_of(name, optimizers)
    return optimizers[prefix].state[param], key_in_state(name.removeprefix(prefix))


def _dict_and_key(name: str, optimizers: dict[str, torch.optim.Optimizer]) -> tuple[_States, object]:
    """Return the dict that has something that all parameters share, and its key there."""
    prefix = _prefix_of(name, optimizers)
    optimizer, unprefixed_name = optimizers[prefix], name.removeprefix(prefix)
    if unprefixed_name.startswith(STATE):
        return optimizer.state, key_in_state(unprefixed_name.removeprefix(STATE))
    if unprefixed_name.startswith(ATTRIBUTE):
        return vars(optimizer), unprefixed_name.removeprefix(ATTRIBUTE)
    return optimizer.param_groups[0], unprefixed_name


def _prefix_of(name: str, optimizers: dict[str, torch.optim.Optimizer]) -> str:
    """Return the prefix of the optimizer, among an instance and what it wraps, that keeps something of this name."""
    return max((prefix for prefix in optimizers if name.startswith(prefix)), key=len)


def forward_counts(
    optimizer: torch.optim.Optimizer,
    params: list[Tensor],
    per_param: Sequence[Mapping[str, int]],
    shared: Mapping[str, int],
    step_count: int,
) -> None:
    """Set forward what an instance counts, as if it had taken more steps.

    Args:
        optimizer: the instance.
        params: its parameters.
        per_param: for each parameter what a step adds, by name.
        shared: the same for what all share.
        step_count: the number of steps.
    """
    optimizers = with_wrapped(optimizer)
    counts: list[tuple[Any, object, int]] = []
    for name, increment in shared.items():
        counts.append((*_dict_and_key(name, optimizers), increment))
    for place, (param, increments) in enumerate(zip(params, per_param)):
        for name, increment in increments.items():
            counts.append((*_container_and_key_of(place, param, name, optimizers), increment))
    for container, key, increment in counts:
        container[key] = container[key] + step_count * increment


# What a step changes.


class Version(NamedTuple):
    """A number or a tensor, and a key that differs if it has been changed or replaced."""

    leaf: object
    key: tuple[object, ...]


def versions_of(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> dict[str, Version]:
    """Return each number and tensor that all parameters share, by name."""
    versions: dict[str, Version] = {}
    for name, leaf in leaves_of(read_state(optimizer, params).shared).items():
        if isinstance(leaf, Tensor):
            versions[name] = Version(leaf, (id(leaf), leaf._version))
        elif isinstance(leaf, Number):
            versions[name] = Version(leaf, (Number, leaf.key))
        elif is_plain(leaf) or (isinstance(leaf, (set, frozenset)) and all(map(is_plain, leaf))):
            versions[name] = Version(leaf, (type(leaf), repr(leaf)))
    return versions


#: A value before a step and after it; None if there is none.
Change: TypeAlias = tuple[object, object]


def changes_between(before: dict[str, Version], after: dict[str, Version], form: Form | None) -> dict[str, Change]:
    """Return what has changed and is not in a form, by name."""
    changes: dict[str, Change] = {}
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        is_in_form = form is not None and container_of(name) in form.shared
        if not is_in_form and (old is None or new is None or old.key != new.key):
            changes[name] = (None if old is None else old.leaf, None if new is None else new.leaf)
    return changes


def fixed_parts(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return what a step must not change, by name, because it is no state that a step as a function could follow."""
    parts: dict[str, object] = {}
    for prefix, each_optimizer in with_wrapped(optimizer).items():
        parts[f"{prefix}param_groups"] = [list(map(id, group["params"])) for group in each_optimizer.param_groups]
        parts[f"{prefix}defaults"] = repr(each_optimizer.defaults)
        parts[f"{prefix}hooks"] = [list(getattr(each_optimizer, name, ())) for name in _HOOKS]
        params = [param for group in each_optimizer.param_groups for param in group["params"]]
        parts[f"{prefix}attributes of a parameter"] = [sorted(vars(param)) for param in params]
    shared = read_state(optimizer, []).shared
    parts["attributes that are no values"] = sorted(name for name, value in shared.items() if not is_plain(value))
    for name, leaf in leaves_of(shared).items():
        if isinstance(leaf, Tensor):
            parts[f"the memory of {name} ({id(leaf)})"] = leaf.untyped_storage()._cdata  # of this very tensor
    return parts
