"""The Python values that a step reads while it is traced: other values need another program.

They are in attributes of modules and other objects, in their classes, in dicts and lists, in variables of closures, and
in globals. `PythonValues` looks at each of those places at every call, and numbers the combinations of values that it
meets. Hooks count as a value of their module or parameter. What is not followed: a value that the step's own Python
changes; new attributes, keys and items; globals of installed packages; items of many or of a `defaultdict`; what a
scripted module reads, except its training flag. What cannot be recorded counts as read: fields of a SimpleNamespace or
in slots, and all that is reached if the step has a branch of torch.cond.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import operator
import types
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from funcamp import _tree, _upstream
from funcamp._jit.constants import ATOMS, ByIdentity, IndescribableError, constant_key, describe
from funcamp._trace.python_reads import Reads, recorded_reads, stop_recording
from funcamp._trace.python_state import (
    CONTAINERS,
    GONE,
    HOOKS,
    MISSING,
    NUMBERS,
    Slot,
    is_users,
    module_of,
    survey,
)
from funcamp._types import Step, Tree
from funcamp._upstream.value_reads import layers_without_reads

_dynamo_callbacks: Any = _upstream.find("torch._dynamo.callback.callback_handler")
#: The largest number of items of a container that are looked at.
_MAX_ITEMS = 256
#: What is found in each place that is gone.
_ALL_MISSING = itertools.repeat(MISSING)
#: Stands for the key of hooks.
_HOOKS = object()
#: The dicts with the hooks on a module, or on a parameter.
_HOOK_DICTS = (*sorted(HOOKS), "_post_accumulate_grad_hooks")
#: What is compared by its parts, besides `ATOMS`: it cannot be changed in place, or is made anew at each read.
_COMPARED_BY_PARTS = (tuple, frozenset, functools.partial, types.MethodType, types.BuiltinFunctionType)


class _Place(NamedTuple):
    """Where a value is."""

    path: str
    holder: Any
    """What holds it: the dict of an object, a dict or list, a variable of a closure, an object or a class."""
    key: Any
    """An item's key, or the name of an attribute; `_HOOKS` for the numbers of the hooks on a module or a parameter."""

    @property
    def identity(self) -> tuple[int, Hashable]:
        """Return what is the same for one place under two paths."""
        return id(self.holder), self.key

    @property
    def is_item(self) -> bool:
        """Return whether it is `holder[key]`; else it is an attribute of the holder."""
        return isinstance(self.holder, CONTAINERS)

    def value(self) -> object:
        """Return the value that is there now; `MISSING` if the place is gone."""
        if self.key is _HOOKS:
            hooks = [hook for name in _HOOK_DICTS for hook in (getattr(self.holder, name, None) or {}).items()]
            return tuple([number for number, hook in hooks if not _is_funcamps(hook)])
        try:
            return self.holder[self.key] if self.is_item else getattr(self.holder, self.key)
        except GONE:
            return MISSING


def _is_dict(holder: object) -> bool:
    """Return whether an object finds its items as a dict does."""
    return isinstance(holder, dict) and type(holder).__getitem__ is dict.__getitem__


def _is_funcamps(hook: object) -> bool:
    """Return whether a hook on a user's module is this library's: it warns, and changes no result."""
    package, _, _ = type(hook).__module__.partition(".")
    return package == "funcamp"


@contextlib.contextmanager
def _stopping_for_dynamo() -> Iterator[None]:
    """Context manager: no reads are recorded once Dynamo compiles, as torch 2.11's cannot read what is recorded."""

    def stop(_: object) -> None:
        stop_recording()

    if not _upstream.usable(_dynamo_callbacks):
        yield
        return
    _dynamo_callbacks.register_start_callback(stop)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # torch._dynamo.reset() has removed it
            _dynamo_callbacks.remove_start_callback(stop)


class Followed:
    """A step whose trace is watched for what its Python reads.

    Args:
        step: the step.
        slots: where Python values are that it may read.
    """

    def __init__(self, step: Step, slots: Mapping[str, Slot]) -> None:
        self._step = step
        self._slots = slots
        self._reads: list[Reads] = []
        self._after_first_run: dict[str, object] = {}
        """What was in each slot then."""
        self.has_branches = False
        """Whether torch.compile has traced a part of it, a branch of torch.cond, where reads are not seen."""

    def __call__(self, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        """Take one step."""
        modules = [slot.value for slot in self._slots.values() if isinstance(slot.value, nn.Module)]
        with (
            recorded_reads(_recordable(self._slots)) as reads,
            _stopping_for_dynamo(),
            layers_without_reads(modules),
        ):
            result = self._step(state, batch)
        if not self._reads:
            self._after_first_run = {slot.path: slot.now_or_missing() for slot in self._slots.values()}
        self._reads.append(reads)
        return result

    def read_places(self) -> Iterator[tuple[_Place, object]]:
        """Yield the places that it has read, or may have read, with what was there before it.

        Of one that the first run has set, and no further one changed, with what it was set to: it is no count.
        """
        for reads in self._reads:
            for place, before in _read_places(self._slots, reads, sees_all=not self.has_branches):
                is_set_once = len(self._reads) > 1 and not isinstance(place.value(), Tensor)
                yield place, self._after_first_run.get(place.path, before) if is_set_once else before


class PythonValues:
    """The places whose values traces have read, and a number for each combination of their values."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, Hashable], _Place] = {}
        """By their identity."""
        self._excluded: dict[tuple[int, Hashable], _Place] = {}
        """Those that the step's own Python changed in the first trace that read them."""
        self._numbers: dict[tuple[Hashable, ...], int] = {}
        """The combinations that were met, each with its number."""
        self._new_numbers = itertools.count()
        self._number = 0
        """That of the combination at the last call."""
        # What every call compares, in lists because that takes a third of the time: the places of items in dicts, and
        # their values; the same of items of other containers, and of attributes. What is gone is `MISSING`.
        self._dicts: list[Any] = []
        self._dict_keys: list[Any] = []
        self._dict_items: list[object] = []
        self._containers: list[Any] = []
        self._keys: list[Any] = []
        self._items: list[object] = []
        self._owners: list[Any] = []
        self._names: list[str] = []
        self._attributes: list[object] = []
        self._next_hook = 0
        """The number of torch's next hook: another one if any was registered since."""
        self._note()

    def number(self) -> int:
        """Return the number of the present combination of values. Called at each step: 40 ns for each place."""
        try:
            dict_items = map(dict.get, self._dicts, self._dict_keys, _ALL_MISSING)
            items = map(operator.getitem, self._containers, self._keys)
            attributes = map(getattr, self._owners, self._names, _ALL_MISSING)
            if (
                all(map(operator.is_, dict_items, self._dict_items))
                and all(map(operator.is_, items, self._items))
                and all(map(operator.is_, attributes, self._attributes))
                and RemovableHandle.next_id == self._next_hook
            ):
                return self._number
        except GONE:
            pass
        return self._note()

    @contextlib.contextmanager
    def followed(self, step: Step, roots: Mapping[str, object]) -> Iterator[Followed]:
        """Context manager: the step, to be traced; at the end what its Python has read is looked at from then on.

        Args:
            step: the step.
            roots: the objects that its Python reaches, by name.
        """
        slots = survey(roots)
        followed = Followed(step, slots)
        hook_places = [(place, place.value()) for place in _hook_places(slots)]
        yield followed
        self._look_at([*followed.read_places(), *hook_places])

    def change(self, former: int, current: int) -> str:
        """Return in which place two combinations differ, and from what to what."""
        change = self._first_change(former, current)
        if change is None:
            return "it went back to an old one"
        place, before, after = change
        if place.key == "training":
            return "modules changed between training and eval mode"
        if place.key is _HOOKS:
            return f"hooks of {place.path} were registered or removed"
        return f"{place.path} changed from {_shown(before)} to {_shown(after)}"

    def is_of_numbers(self, former: int, current: int) -> bool:
        """Return whether a number changed to another one."""
        change = self._first_change(former, current)
        return change is not None and all(type(value) is tuple and value[0] in (int, float) for value in change[1:])

    def _first_change(self, former: int, current: int) -> tuple[_Place, Hashable, Hashable] | None:
        """Return a place in which two combinations differ, with what was there and is there now."""
        combinations = {number: values for values, number in self._numbers.items()}
        changes = zip(self._places.values(), combinations.get(former, ()), combinations.get(current, ()))
        return next((change for change in changes if change[1] != change[2]), None)

    def _look_at(self, read_places: Iterable[tuple[_Place, object]]) -> None:
        """Look at further places from now on. What was traced before depends on none of them.

        Args:
            read_places: the places that a trace has read, and what was there before it.
        """
        former_count = len(self._places)
        for place, before in read_places:
            if place.identity in self._places or place.identity in self._excluded:
                continue
            if _key_of(place.value()) == _key_of(before):
                self._places[place.identity] = place
            else:
                self._excluded[place.identity] = place
        added = [_key_of(place.value()) for place in [*self._places.values()][former_count:]]
        self._numbers = {(*keys, *added): number for keys, number in self._numbers.items()}
        self._note()

    def _note(self) -> int:
        """Note the present values; return the number of their combination."""
        values = [(place, place.value()) for place in self._places.values()]
        dict_items = [(place, value) for place, value in values if _is_dict(place.holder)]
        items = [(place, value) for place, value in values if place.is_item and not _is_dict(place.holder)]
        attributes = [(place, value) for place, value in values if not place.is_item and place.key is not _HOOKS]
        self._dicts = [place.holder for place, _ in dict_items]
        self._dict_keys = [place.key for place, _ in dict_items]
        self._dict_items = [value for _, value in dict_items]
        self._containers = [place.holder for place, _ in items]
        self._keys = [place.key for place, _ in items]
        self._items = [value for _, value in items]
        self._owners = [place.holder for place, _ in attributes]
        self._names = [place.key for place, _ in attributes]
        self._attributes = [value for _, value in attributes]
        self._next_hook = RemovableHandle.next_id
        combination = tuple([_key_of(value) for _, value in values])
        if combination not in self._numbers:
            self._numbers[combination] = next(self._new_numbers)
        self._number = self._numbers[combination]
        return self._number


def _hook_places(slots: Mapping[str, Slot]) -> Iterator[_Place]:
    """Yield the places of the hooks on modules and parameters."""
    for path, slot in slots.items():
        if isinstance(slot.value, (nn.Module, nn.Parameter)):
            yield _Place(path, slot.value, _HOOKS)


def _recordable(slots: Mapping[str, Slot]) -> Iterator[tuple[type, str]]:
    """Yield the classes that have attributes or methods among these, or whose objects have, and the names."""
    for slot in slots.values():
        kind = _recorded_class(slot, slots)
        is_of_every_object = slot.key in (*HOOKS, "training") or str(slot.key).startswith("__")
        if kind is not None and not is_of_every_object:
            yield kind, slot.key


def _recorded_class(slot: Slot, slots: Mapping[str, Slot]) -> type | None:
    """Return the class in which the reads of a slot can be noted; None if there is none."""
    owner = _owner_of(slot, slots)
    if _is_in_dict_of_object(slot, slots):
        return None if isinstance(owner, (Tensor, enum.Enum)) else type(owner)
    # Not an optimizer, whose code `stateless` looks at; not a class that is used itself, as an autograd.Function is.
    if not isinstance(slot.owner, type) or isinstance(owner, type) or not isinstance(slot.value, types.FunctionType):
        return None
    return None if issubclass(slot.owner, (enum.Enum, torch.optim.Optimizer)) else slot.owner


def _owner_of(slot: Slot, slots: Mapping[str, Slot]) -> object:
    """Return the object that a slot is in; None for a root."""
    return None if slot.parent is None else slots[slot.parent].value


def _is_in_dict_of_object(slot: Slot, slots: Mapping[str, Slot]) -> bool:
    """Return whether a slot is an attribute in the dict of an object."""
    owner = _owner_of(slot, slots)
    return slot.owner is getattr(owner, "__dict__", None) and not isinstance(owner, (type, types.FunctionType))


def _read_places(slots: Mapping[str, Slot], reads: Reads, *, sees_all: bool) -> Iterator[tuple[_Place, object]]:
    """Yield the places among these slots that a trace has read, or may have read, with what was there before it.

    Args:
        slots: the slots before it, by path.
        reads: what it has read.
        sees_all: whether it has read nothing else.
    """

    def may_have_read(slot: Slot) -> bool:
        """Return whether the trace has read what is in a slot, or may have: it has found the object around it."""
        kind = _recorded_class(slot, slots)
        owner = _owner_of(slot, slots)
        is_of_object = slot.owner is not kind
        if sees_all and kind is not None and reads.can_tell(kind, slot.key, of_object=is_of_object):
            holder = owner if is_of_object else kind
            # Of an object that was found, and nothing of it read by name, something else may be: `vars(args)`.
            is_read_otherwise = is_of_object and id(owner) in found_ids and not isinstance(owner, nn.Module)
            return reads.has_read(holder, slot.key) or (is_read_otherwise and not reads.has_read_any(holder))
        return slot.parent is None or id(owner) in found_ids

    # An object may be in several places, of which only one was read: so until no further one is found.
    found_ids: set[int] = set()
    former_count = -1
    while former_count < len(found_ids):
        former_count = len(found_ids)
        found_ids |= {id(slot.value) for slot in slots.values() if may_have_read(slot)}
    for path, slot in slots.items():
        if not may_have_read(slot):
            continue
        owner = _owner_of(slot, slots)
        if isinstance(slot.value, nn.Parameter):
            yield _Place(f"{path}.requires_grad", slot.value, "requires_grad"), slot.value.requires_grad
        elif _can_be_followed(slot, owner):
            yield _place_of(slot, owner), slot.value
        if isinstance(slot.value, torch.jit.ScriptModule):  # it reads its flag in C++
            yield _Place(f"{path}.training", slot.value, "training"), slot.value.training
    flagged = dict(reads.modules)
    if not sees_all or not reads.can_tell(nn.Module, "training", of_object=True):
        flagged |= {id(slot.value): slot.value for slot in slots.values() if isinstance(slot.value, nn.Module)}
    for module in flagged.values():
        yield _Place("a module's training", vars(module), "training"), module.training


def _place_of(slot: Slot, owner: object) -> _Place:
    """Return the place of a slot.

    owner: the object that it is in.
    """
    if isinstance(slot.owner, types.CellType):
        return _Place(slot.path, slot.owner, "cell_contents")
    if isinstance(slot.owner, type) and not isinstance(slot.value, types.FunctionType):
        return _Place(slot.path, owner, slot.key)  # the object may get a value besides that of its class
    return _Place(slot.path, slot.owner, slot.key)


def _can_be_followed(slot: Slot, owner: object) -> bool:
    """Return whether the value in a slot is one that a step's Python may read, and that others may replace."""
    if slot.owner is None or isinstance(slot.value, (Tensor, types.ModuleType)):
        return False
    if isinstance(slot.owner, OrderedDict) and _is_funcamps(slot.value):  # a dict of hooks
        return False
    if hasattr(type(slot.owner), "__missing__"):  # a look at a missing key adds it, as in a defaultdict
        return False
    if isinstance(slot.owner, type):
        return isinstance(slot.value, types.FunctionType) or not hasattr(type(slot.value), "__get__")
    if isinstance(owner, nn.Module):
        return _can_be_followed_in_module(slot, owner)
    if isinstance(owner, (types.FunctionType, types.MethodType)):
        return is_users(module_of(owner))
    if isinstance(owner, CONTAINERS):
        return len(owner) <= _MAX_ITEMS
    return not isinstance(owner, enum.Enum)


def _can_be_followed_in_module(slot: Slot, module: nn.Module) -> bool:
    """Return the same for a slot of a module. Its training flag and its hooks are other places."""
    if isinstance(module, torch.jit.ScriptModule) or slot.key in (*HOOKS, "training"):
        return False
    # A buffer that is None may be given later, as the weights of a loss.
    return slot.owner is vars(module) or slot.value is None or isinstance(slot.value, nn.Module)


def _key_of(value: object) -> Hashable:
    """Return what a value is compared by: a constant by its type and its value, other objects by identity."""
    if type(value) in ATOMS:
        return constant_key(value)
    if isinstance(value, (*NUMBERS, *_COMPARED_BY_PARTS)):
        with contextlib.suppress(IndescribableError):
            return describe(value)
    return ByIdentity(value)


def _shown(key: Any) -> str:
    """Return the key of a value as a text."""
    if isinstance(key, ByIdentity):
        return "nothing" if key.value is MISSING else _tree.brief(key.value)
    kind, value = key
    if kind is tuple:
        return f"({', '.join(map(_shown, value))})"
    if kind not in ATOMS:
        return f"another {kind.__name__}"
    return str(value) if kind in (float, complex) else repr(value)
