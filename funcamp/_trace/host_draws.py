"""Numbers that Python or numpy draws while a step is traced: the program would repeat them at every step."""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any
from unittest import mock

from funcamp._trace.user_line import in_stack


class HostDraws:
    """The state of the generators of Python and numpy when this was made."""

    def __init__(self) -> None:
        self._before = [(name, get, put, get()) for name, (get, put) in _generators().items()]

    def since(self) -> str:
        """Return the names of the generators that are in another state now, because of any thread; "" for none."""
        changed = (name for name, get, _, state in self._before if pickle.dumps(get()) != pickle.dumps(state))
        return " and ".join(changed)

    def undo(self) -> None:
        """Set the generators back."""
        for _, _, put, state in self._before:
            put(state)


def line_of_draw(run: Callable[[], object]) -> str:
    """Return the line of user code that first draws in `run`, in this thread; "" for none."""
    lines: list[str] = []
    thread = threading.get_ident()

    def drawn() -> None:
        if threading.get_ident() == thread:
            lines.append(in_stack(beside=(random.__file__,)))

    def profile(_: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and getattr(called, "__self__", None) is _owner(random.random):
            drawn()

    def watched(fn: Any) -> Any:
        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            drawn()
            return fn(*args, **kwargs)

        return call

    before = sys.getprofile()
    with contextlib.ExitStack() as stack:
        if numpy := sys.modules.get("numpy.random"):  # its functions are not reported to a profile
            own = {name: fn for name, fn in vars(numpy).items() if _owner(fn) is _owner(numpy.rand) is not None}
            stack.enter_context(mock.patch.multiple(numpy, **{name: watched(fn) for name, fn in own.items()}))
        stack.callback(sys.setprofile, before)
        sys.setprofile(profile)
        stack.enter_context(contextlib.suppress(Exception))  # what the first run changed
        run()
    return lines[0] if lines else ""


def _owner(fn: Any) -> Any:
    return getattr(fn, "__self__", None)


def _generators() -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Return how to get and set the state of each generator that modules draw from."""
    found: dict[str, Any] = {"Python's random": (random.getstate, random.setstate)}
    if numpy := sys.modules.get("numpy.random"):
        found["numpy.random"] = functools.partial(numpy.get_state, legacy=False), numpy.set_state
    return found
