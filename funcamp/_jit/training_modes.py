"""The training flags of the modules that a step runs: its Python reads them while it is traced."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Mapping
from typing import TypeAlias

from torch import nn

from funcamp._trace.python_state import survey

_training = operator.itemgetter("training")


class TrainingModes:
    """The training flags of all modules that can be reached from a step, as a number for each combination of them."""

    def __init__(self) -> None:
        self._attributes: list[_Attributes] = []
        """Those of each module, as a mapping with its flag."""
        self._combinations: list[list[bool]] = []
        """The combinations of flags that were met, each under its number."""
        self._number = 0
        self._training: list[_Attributes] = []
        """The attributes of those that were in training mode at the last call."""
        self._evaluating: list[_Attributes] = []
        self._note([])

    def watch(self, roots: Mapping[str, object]) -> None:
        """Look from now on at the modules among these objects and inside of them.

        Args:
            roots: the objects that the step's Python reaches, by name.
        """
        objects = [slot.value for slot in survey(roots).values()]
        modules = {id(module): module for module in objects if isinstance(module, nn.Module)}
        self._attributes = [_attributes_of(module) for module in modules.values() if _may_read_its_flag(module)]
        self._combinations = []
        self._note(list(map(_training, self._attributes)))

    def number(self) -> int:
        """Return the number of the present combination of flags. Called at each step: 20 ns for each module."""
        if not all(map(_training, self._training)) or any(map(_training, self._evaluating)):
            self._note(list(map(_training, self._attributes)))
        return self._number

    def _note(self, flags: list[bool]) -> None:
        """Note the present flags, and their number."""
        if flags not in self._combinations:
            self._combinations.append(flags)
        self._number = self._combinations.index(flags)
        self._training = [attributes for attributes, is_training in zip(self._attributes, flags) if is_training]
        self._evaluating = [attributes for attributes, is_training in zip(self._attributes, flags) if not is_training]


class _ScriptAttributes:
    """The attributes of a scripted module, which are not in its `__dict__`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getitem__(self, name: str) -> object:
        return getattr(self._module, name)


_Attributes: TypeAlias = dict[str, object] | _ScriptAttributes


def _attributes_of(module: nn.Module) -> _Attributes:
    """Return the attributes of a module, among them its training flag."""
    return vars(module) if "training" in vars(module) else _ScriptAttributes(module)


def _may_read_its_flag(module: nn.Module) -> bool:
    """Return whether some code may read this module's training flag.

    No code reads that of a linear layer, or of another class of torch whose code does not name the flag, unless the
    module itself got a hook or a method. These are half of a model's modules, and each costs time at every step.
    """
    attributes = vars(module)
    has_hooks = bool(attributes.get("_forward_hooks") or attributes.get("_forward_pre_hooks"))
    has_method = any(isinstance(value, (types.FunctionType, types.MethodType)) for value in attributes.values())
    return has_hooks or has_method or not _ignores_its_flag(type(module))  # type: ignore[arg-type]


@functools.cache
def _ignores_its_flag(kind: type) -> bool:
    """Return whether a class of modules is torch's, and none of its functions names the flag."""
    classes = kind.__mro__[: kind.__mro__.index(nn.Module)]
    if not all(each.__module__.startswith("torch.nn.modules.") for each in classes):
        return False
    for each in classes:
        for value in vars(each).values():
            if isinstance(value, types.FunctionType) and "training" in value.__code__.co_names:
                return False
    return True
