"""Numbers that Python or numpy draws while a step is traced: the program would repeat them at every step."""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from funcamp._trace.user_line import in_stack
from funcamp._upstream.replaced import replaced

#: What a module of random numbers has besides functions that draw.
_QUIET = ("getstate", "setstate", "get_state", "set_state", "default_rng", "test")


class HostDraws:
    """The states of the global generators of Python and numpy when this was made."""

    def __init__(self) -> None:
        self._modules = [module for name in ("random", "numpy.random") if (module := sys.modules.get(name))]
        self._before = self._states()

    def since(self) -> str:
        """Return the names of the generators that are in another state now, because of any thread; "" for none."""
        changed = zip(self._modules, self._before, self._states())
        names = {"random": "Python's random"}
        return " and ".join(names.get(module.__name__, module.__name__) for module, was, now in changed if was != now)

    def line(self, run: Callable[[], object]) -> str:
        """Run once more from the same states and return the line of user code that draws; "" if it was another thread.

        If this run draws, or leaves the same states as the first, the generators are set back to before the first.
        """
        after, lines, failed = self._states(), [], False
        thread = threading.get_ident()

        def watched(fn: Any) -> Any:
            @functools.wraps(fn)
            def call(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() == thread:
                    lines.append(in_stack(beside=(random.__file__,)))
                return fn(*args, **kwargs)

            return call

        self._set(self._before)
        with contextlib.ExitStack() as stack:
            for module in self._modules:
                drawing = {name: watched(fn) for name, fn in vars(module).items() if _draws(name, fn)}
                stack.enter_context(replaced(module, **drawing))
            try:
                run()
            except Exception:  # because of what the first run changed
                failed = True
        if not lines and not failed and self._states() != after:
            self._set(after)
            return ""
        self._set(self._before)
        return lines[0] if lines else "a line that is not known"

    def _states(self) -> list[bytes]:
        return [pickle.dumps(_state(module)[0]()) for module in self._modules]

    def _set(self, states: list[bytes]) -> None:
        for module, state in zip(self._modules, states):
            _state(module)[1](pickle.loads(state))


def _state(module: ModuleType) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return how to get and set the state of a module's generator."""
    if module is random:
        return random.getstate, random.setstate
    return functools.partial(module.get_state, legacy=False), module.set_state


def _draws(name: str, fn: Any) -> bool:
    return not name.startswith("_") and name not in _QUIET and callable(fn) and not isinstance(fn, type)
