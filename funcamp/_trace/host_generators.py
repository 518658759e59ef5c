"""The generators of random numbers of Python and numpy, and their states."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_OF_NUMPY = ("Generator", "RandomState")


def host_generators() -> list[ModuleType]:
    """Return the modules whose functions draw from a global generator, as far as they are imported."""
    imported = [sys.modules.get(name) for name in ("random", "numpy.random")]
    return [module for module in imported if module is not None]


def is_own_generator(value: object) -> bool:
    """Return whether a value is a generator of Python or numpy with a state of its own, and not a global one."""
    is_numpys = type(value).__name__ in _OF_NUMPY and type(value).__module__.startswith("numpy.random")
    if isinstance(value, random.SystemRandom) or not (is_numpys or isinstance(value, random.Random)):
        return False
    global_draws: list[Any] = [random.random]
    if "numpy.random" in sys.modules:
        global_draws.append(sys.modules["numpy.random"].rand)
    return all(value is not draw.__self__ for draw in global_draws)


def states_of(generators: Sequence[Any]) -> list[bytes]:
    """Return the states of generators, of modules or of objects, in a form that can be compared."""
    states: list[Any] = []
    for generator in generators:
        if generator is random or isinstance(generator, random.Random):
            states.append(generator.getstate())
        else:
            states.append(generator.get_state(legacy=False) if isinstance(generator, ModuleType) else generator)
    return [pickle.dumps(state) for state in states]


def set_states(modules: Sequence[ModuleType], states: Sequence[bytes]) -> None:
    """Set the states of the modules' generators."""
    for module, state in zip(modules, states, strict=True):
        set_state = random.setstate if module is random else module.set_state
        set_state(pickle.loads(state))
