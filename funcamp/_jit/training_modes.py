"""The training flags that a step's Python reads while it is traced: another flag needs another program."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch
from torch import nn

from funcamp._trace.python_state import survey
from funcamp._trace.training_flags import recorded_flags
from funcamp._types import Step, Tree

_training = operator.itemgetter("training")


class TrainingModes:
    """The flags that were read, and those of scripted modules, as a number for each combination of them."""

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

    def watch_scripted(self, roots: Mapping[str, object]) -> None:
        """Look from now on at the scripted modules among these objects and inside of them.

        They read their flags in C++.

        Args:
            roots: the objects that the step's Python reaches, by name.
        """
        objects = [slot.value for slot in survey(roots).values()]
        self._watch(value for value in objects if isinstance(value, torch.jit.ScriptModule))

    def recorded(self, step: Step) -> Step:
        """Return the step; each run also notes the modules whose flags it reads, to look at them from then on."""

        def run(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
            with recorded_flags() as modules:
                result = step(state, batch)
            self._watch(modules.values())
            return result

        return run

    def _watch(self, modules: Iterable[nn.Module]) -> None:
        """Look at further modules. What was traced before depends on none of them."""
        known_ids = set(map(id, self._attributes))
        for module in modules:
            attributes = _attributes_of(module)
            if id(attributes) in known_ids:
                continue
            self._attributes.append(attributes)
            for flags in self._combinations:
                flags.append(bool(attributes["training"]))
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
