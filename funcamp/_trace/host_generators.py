"""The global generators of random numbers of Python and numpy, and their states."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Sequence
from types import ModuleType


def host_generators() -> list[ModuleType]:
    """Return the modules whose functions draw from a global generator, as far as they are imported."""
    imported = [sys.modules.get(name) for name in ("random", "numpy.random")]
    return [module for module in imported if module is not None]


def states_of(modules: Sequence[ModuleType]) -> list[bytes]:
    """Return the states of the modules' generators, in a form that can be compared: numpy's contains an array."""
    states = [random.getstate() if module is random else module.get_state(legacy=False) for module in modules]
    return [pickle.dumps(state) for state in states]


def set_states(modules: Sequence[ModuleType], states: Sequence[bytes]) -> None:
    """Set the states of the modules' generators."""
    for module, state in zip(modules, states, strict=True):
        set_state = random.setstate if module is random else module.set_state
        set_state(pickle.loads(state))
