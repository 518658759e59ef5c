"""The training flags of the modules that a step runs: its Python reads them while it is traced."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Mapping
from typing import Any

from torch import nn

from funcamp._trace.python_state import survey

_training = operator.itemgetter("training")


class TrainingModes:
    """The training flags of all modules that can be reached from a step, as a number for each combination of them."""

    def __init__(self) -> None:
        self._attributes: list[Any] = []
        self._known: list[list[bool]] = []
        self._number = 0
        self._training: list[Any] = []
        self._evaluating: list[Any] = []
        self._take([])

    def watch(self, roots: Mapping[str, Any]) -> None:
        """Look from now on at the modules among these objects and inside of them.

        Args:
            roots: the objects that the step's Python reaches, by name.
        """
        modules = {id(slot.value): slot.value for slot in survey(roots).values() if isinstance(slot.value, nn.Module)}
        self._attributes = [_attributes(module) for module in modules.values() if _may_read_its_flag(module)]
        self._known = []
        self._take(list(map(_training, self._attributes)))

    def number(self) -> int:
        """Return the number of the present combination of flags. Called at each step: 20 ns for each module."""
        if not all(map(_training, self._training)) or any(map(_training, self._evaluating)):
            self._take(list(map(_training, self._attributes)))
        return self._number

    def _take(self, flags: list[bool]) -> None:
        if flags not in self._known:
            self._known.append(flags)
        self._number = self._known.index(flags)
        self._training = [one for one, flag in zip(self._attributes, flags) if flag]
        self._evaluating = [one for one, flag in zip(self._attributes, flags) if not flag]


class _OfScript:
    """The attributes of a scripted module, which are not in its `__dict__`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getitem__(self, name: str) -> Any:
        return getattr(self._module, name)


def _attributes(module: nn.Module) -> Any:
    return vars(module) if "training" in vars(module) else _OfScript(module)


def _may_read_its_flag(module: nn.Module) -> bool:
    """Return whether some code may read this module's training flag.

    None does that of a linear layer, or of another class of torch whose code does not name the flag, unless a hook or
    a method was put on the module itself. They are half of a model's modules, and each costs time at every step.
    """
    own = vars(module)
    hooked = any(own.get(hooks) for hooks in ("_forward_hooks", "_forward_pre_hooks"))
    replaced = any(isinstance(value, (types.FunctionType, types.MethodType)) for value in own.values())
    return hooked or replaced or not _ignores_its_flag(type(module))  # type: ignore[arg-type]


@functools.cache
def _ignores_its_flag(kind: type) -> bool:
    classes = kind.__mro__[: kind.__mro__.index(nn.Module)]
    if not all(each.__module__.startswith("torch.nn.modules.") for each in classes):
        return False
    functions = [value for each in classes for value in vars(each).values() if isinstance(value, types.FunctionType)]
    return not any("training" in function.__code__.co_names for function in functions)
