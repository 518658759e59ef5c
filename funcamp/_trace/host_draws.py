"""Numbers that Python or numpy draws while a step is traced: the program would repeat them at every step."""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from funcamp._trace.user_line import in_stack
from funcamp._upstream.replaced import replaced

_log = logging.getLogger("funcamp")
#: What a module of random numbers has besides functions that draw.
_QUIET = ("getstate", "setstate", "get_state", "set_state", "default_rng", "test")
_SPOKEN = {"random": "Python's random"}


class HostDraws:
    """Watches the global generators of Python and numpy.

    Whether numbers were drawn follows from the generators' states. Who drew them is noted by the modules' functions,
    which are replaced meanwhile; a function that was imported by name is not seen.
    """

    def __init__(self) -> None:
        self._modules = [module for name in ("random", "numpy.random") if (module := sys.modules.get(name))]
        self._thread = threading.get_ident()
        self._line = ""
        self._others_line = ""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Context manager: functions that draw are noted."""
        with contextlib.ExitStack() as stack:
            for module in self._modules:
                drawing = {name: self._noting(fn) for name, fn in vars(module).items() if _draws(name, fn)}
                stack.enter_context(replaced(module, **drawing))
            self._before = self._states()
            yield

    def found(self) -> tuple[str, str] | None:
        """Return the names of the generators that the watched code drew from, and its line; None if there are none.

        The generators are then set back. If another thread drew and this one did not, such as one that loads data, that
        is a warning: the watched code may have waited for it.
        """
        changed = [
            module for module, was, now in zip(self._modules, self._before, self._states(), strict=True) if was != now
        ]
        if not changed:
            return None
        names = " and ".join(_SPOKEN.get(module.__name__, module.__name__) for module in changed)
        if self._others_line and not self._line:
            _log.warning(
                "jit: another thread drew from %s while the step was traced, %s: if the step waits for its numbers, "
                "the program repeats them; draw from torch's generator, or pass the numbers in the batch",
                names,
                self._others_line,
            )
            return None
        if not self._others_line:
            self._set_back()
        return names, self._line or "a line that is not known, or another thread,"

    def _noting(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(draw)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                self._others_line = self._others_line or in_stack(beside=(random.__file__,))
            elif not self._line:
                self._line = in_stack(beside=(random.__file__,))
            return draw(*args, **kwargs)

        return noted

    def _states(self) -> list[bytes]:
        return [pickle.dumps(_state_functions(module)[0]()) for module in self._modules]

    def _set_back(self) -> None:
        for module, state in zip(self._modules, self._before, strict=True):
            _state_functions(module)[1](pickle.loads(state))


def _state_functions(module: ModuleType) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return how to get and set the state of a module's generator."""
    if module is random:
        return random.getstate, random.setstate
    return functools.partial(module.get_state, legacy=False), module.set_state


def _draws(name: str, fn: Any) -> bool:
    return not name.startswith("_") and name not in _QUIET and callable(fn) and not isinstance(fn, type)
