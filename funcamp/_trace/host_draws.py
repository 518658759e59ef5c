"""Numbers that Python or numpy draws while a step is traced: the program would repeat them at every step."""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from funcamp import _upstream
from funcamp._trace.host_generators import host_generators, set_states, states_of
from funcamp._trace.user_line import line_in_stack
from funcamp._upstream.replaced import replaced

_log = logging.getLogger("funcamp")
#: Dynamo's set of the ids of numpy's functions, which it makes once. It must not have those of functions of a trace: a
#: later function at such an address would be one of numpy for it, for torch.cond and all of torch.compile.
_numbers_of_numpys_functions = _upstream.find("torch._dynamo.trace_rules._numpy_function_ids", set)
#: The functions of a module of random numbers that do not draw.
_NOT_DRAWING = ("getstate", "setstate", "get_state", "set_state", "default_rng", "test")
#: What errors call a module, if not by its name.
_NAMES_IN_ERRORS = {"random": "Python's random"}


class HostDraws:
    """Watches the global generators of Python and numpy.

    Whether numbers were drawn follows from the generators' states. Who drew them is noted by the modules' functions,
    which are replaced meanwhile; a function that was imported by name is not seen.
    """

    def __init__(self) -> None:
        self._modules = host_generators()
        self._states_before: list[bytes] = []
        self._thread = threading.get_ident()
        self._line = ""
        """The first line of this thread that drew."""
        self._other_threads_line = ""
        """The first line of another thread that drew."""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Context manager: functions that draw are noted."""
        _numbers_of_numpys_functions()
        with contextlib.ExitStack() as stack:
            for module in self._modules:
                noting = {name: self._noting(fn) for name, fn in vars(module).items() if _draws(name, fn)}
                stack.enter_context(replaced(module, **noting))
            self._states_before = states_of(self._modules)
            try:
                yield
            except BaseException:
                if not self._other_threads_line:
                    self._set_back()
                raise

    def find_draws(self) -> tuple[str, str] | None:
        """Return the names of the generators that the watched code drew from, and its line; None if there are none.

        The generators are then set back, as they are if the watched code fails. If only another thread drew, such as
        one that loads data, this logs a warning: the watched code may have waited for it.
        """
        changed_modules: list[ModuleType] = []
        for module, before, now in zip(self._modules, self._states_before, states_of(self._modules), strict=True):
            if before != now:
                changed_modules.append(module)
        if not changed_modules:
            return None
        names = " and ".join(_NAMES_IN_ERRORS.get(module.__name__, module.__name__) for module in changed_modules)
        if self._other_threads_line and not self._line:
            _log.warning(
                "jit: another thread drew from %s while the step was traced, %s: if the step waits for its numbers, "
                "the program repeats them; draw from torch's generator, or pass the numbers in the batch, as tensors",
                names,
                self._other_threads_line,
            )
            return None
        if not self._other_threads_line:  # else that thread would draw its numbers a second time
            self._set_back()
        return names, self._line or "a line that is not known, or another thread,"

    def _noting(self, draw: Callable[..., object]) -> Callable[..., object]:
        """Return a function that draws, and notes the line that called it."""

        @functools.wraps(draw)
        def noted(*args: object, **kwargs: object) -> object:
            # Functions of `random` call others of it, whose line is not the user's.
            is_this_thread = threading.get_ident() == self._thread
            if is_this_thread and not self._line:
                self._line = line_in_stack(beside=(random.__file__,))
            elif not is_this_thread and not self._other_threads_line:
                self._other_threads_line = line_in_stack(beside=(random.__file__,))
            return draw(*args, **kwargs)

        return noted

    def _set_back(self) -> None:
        set_states(self._modules, self._states_before)


def _draws(name: str, attribute: Any) -> bool:
    """Return whether an attribute of a module of random numbers is a function that draws."""
    if name.startswith("_") or name in _NOT_DRAWING:
        return False
    return callable(attribute) and not isinstance(attribute, type)
