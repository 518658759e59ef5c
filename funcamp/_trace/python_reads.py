"""Which attributes and methods Python reads while a step is traced: a program has what followed from them then.

A descriptor in a class comes before what is in an object's dict, so every read in Python is seen, also one of torch's.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn

from funcamp._trace.python_state import MISSING

_TRAINING = (nn.Module, "training")


class Reads:
    """What one thread has read in a trace.

    It keeps no object alive, because a tensor that lives on after a trace is one that the step's Python keeps. Ask
    about objects that live since before the trace.
    """

    def __init__(self) -> None:
        self.recorded: dict[tuple[type, str], type[_Recorded]] = {}
        """The classes, and the names of the attributes, whose reads are noted; and what stands in the class."""
        self._places: set[tuple[int, str]] = set()
        """The ids of the objects and classes whose attributes were read, and the names of the attributes."""
        self._holder_ids: set[int] = set()
        self.modules: dict[int, nn.Module] = {}
        """The modules whose training flags were read, by id; not those that a scripted module reads."""

    def note(self, owner: object, name: str) -> None:
        """Note that an attribute was read."""
        if name == "training" and isinstance(owner, nn.Module):
            self.modules[id(owner)] = owner
        else:
            self._places.add((id(owner), name))
            self._holder_ids.add(id(owner))

    def can_tell(self, kind: type, name: str, *, of_object: bool) -> bool:
        """Return whether the reads of an attribute of a class, or of its objects, are noted."""
        found = self.recorded.get((kind, name))
        return found is not None and (found is _RecordedOfObjects or not of_object)

    def has_read(self, holder: object, name: str) -> bool:
        """Return whether an attribute of an object, or of a class, was read."""
        return (id(holder), name) in self._places

    def has_read_any(self, holder: object) -> bool:
        """Return whether any attribute of an object was read."""
        return id(holder) in self._holder_ids


_lock = threading.Lock()
#: For each thread that records, what it has read. Without any, the classes are as they were.
_reads_in_thread: dict[int, Reads] = {}
#: How many of the threads record an attribute of a class.
_recorders: Counter[tuple[type, str]] = Counter()


@contextlib.contextmanager
def recorded_reads(attributes: Iterable[tuple[type, str]] = ()) -> Iterator[Reads]:
    """Context manager: what this thread reads of these classes and their objects, and all modules' training flags.

    Args:
        attributes: classes, and names of what their objects have in their dicts, or of what they have themselves.
    """
    thread = threading.get_ident()
    reads = Reads()
    with _lock:
        for attribute in {_TRAINING, *attributes}:
            stand_in_class = _install(*attribute)
            if stand_in_class is not None:
                _recorders[attribute] += 1
                reads.recorded[attribute] = stand_in_class
        _reads_in_thread[thread] = reads
    try:
        yield reads
    finally:
        with _lock:
            del _reads_in_thread[thread]
            for attribute in reads.recorded:
                _recorders[attribute] -= 1
                if not _recorders[attribute]:
                    del _recorders[attribute]
                    _uninstall(*attribute)


def stop_recording() -> None:
    """Leave all classes as they were: Dynamo is about to read them. From now on no trace can tell what it has read."""
    with _lock:
        for attribute in _recorders:
            _uninstall(*attribute)
        _recorders.clear()
        for reads in _reads_in_thread.values():
            reads.recorded.clear()


@contextlib.contextmanager
def own_flags() -> Iterator[None]:
    """Context manager: the step itself sets the training flags, so that nothing follows from what they were before."""
    if torch.compiler.is_dynamo_compiling():  # it knows no threads; nothing is recorded there
        yield
        return
    reads = _reads_in_thread.get(threading.get_ident())
    known = {} if reads is None else dict(reads.modules)
    try:
        yield
    finally:
        if reads is not None:
            reads.modules = known


class _Recorded:
    """Stands in a class for a method, and notes that it was read.

    Args:
        name: of the attribute.
        home: the class that has the default: the one in which this stands, or one that it inherits from.
        default: what that has under that name; `MISSING` if nothing.
        own: what the class itself has.
    """

    def __init__(self, name: str, home: type, default: Any, own: object) -> None:
        self.name = name
        self.home = home
        self.default = default
        self.own = own

    def __get__(self, owner: Any, kind: type) -> object:
        """Return what the class has.

        Raises:
            AttributeError: nothing. Python then asks the `__getattr__` of the class.
        """
        if not torch.compiler.is_dynamo_compiling():  # a branch of torch.cond
            self._note(self.home)
        if self.default is MISSING:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {self.name!r}")
        if isinstance(self.default, FunctionType) and owner is not None:
            # Dynamo cannot make a method.
            make = functools.partial if torch.compiler.is_dynamo_compiling() else MethodType
            return make(self.default, owner)
        if hasattr(type(self.default), "__get__"):
            return self.default.__get__(owner, kind)
        return self.default

    def _note(self, holder: object) -> None:
        """Note that this thread has read the attribute of an object or a class."""
        reads = _reads_in_thread.get(threading.get_ident())
        # Such as a branch of torch.cond, whose tensors have no values.
        is_made_by_trace = type(holder) is nn.Module or isinstance(holder, fx.GraphModule)
        if reads is not None and not is_made_by_trace:
            reads.note(holder, self.name)


class _RecordedOfObjects(_Recorded):
    """The same for what is in the dicts of objects: it comes before them.

    Not for a method: an object may have another one in its dict, and `super()` asks for that of the class.
    """

    def __get__(self, owner: Any, kind: type) -> object:
        """Return what is in the object's dict, or what the class has."""
        if owner is None or self.name not in owner.__dict__:
            return super().__get__(owner, kind)
        value: object = owner.__dict__[self.name]
        if not torch.compiler.is_dynamo_compiling():
            self._note(owner)
        return value

    def __set__(self, owner: Any, value: object) -> None:
        owner.__dict__[self.name] = value

    def __delete__(self, owner: Any) -> None:
        if self.name not in owner.__dict__:
            raise AttributeError(self.name)
        del owner.__dict__[self.name]


def _install(kind: type, name: str) -> type[_Recorded] | None:
    """Record the reads of an attribute of a class; return None if they cannot be, else what stands there now."""
    existing = vars(kind).get(name)
    if isinstance(existing, _Recorded):  # another thread traces
        return type(existing)
    home, default = _found_in_class(kind, name)
    if hasattr(type(default), "__set__"):  # a property, or a slot: it is not in the object's dict
        return None
    stand_in_class = _Recorded if isinstance(default, FunctionType) else _RecordedOfObjects
    own = vars(kind).get(name, MISSING)
    try:  # not by the class of the class, which may refuse or count what is set
        type.__setattr__(kind, name, stand_in_class(name, home, default, own))
    except TypeError:  # a class in C
        return None
    return stand_in_class


def _uninstall(kind: type, name: str) -> None:
    """Leave a class as it was."""
    stand_in = vars(kind).get(name)
    if not isinstance(stand_in, _Recorded):  # the step has given the class another value
        return
    if stand_in.own is MISSING:
        type.__delattr__(kind, name)
    else:
        type.__setattr__(kind, name, stand_in.own)


def _found_in_class(kind: type, name: str) -> tuple[type, object]:
    """Return what a class or one that it inherits from has under a name, and which; `MISSING` if nothing."""
    for base in kind.__mro__:
        found = vars(base).get(name, MISSING)
        if isinstance(found, _Recorded):
            found = found.own
        if found is not MISSING:
            return base, found
    return kind, MISSING
