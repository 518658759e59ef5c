"""Report what a long compilation is doing, and how long it took."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import threading
import time
from types import TracebackType
from typing import Literal

import torch

_log = logging.getLogger("funcamp")

#: Seconds before the first message.
PATIENCE = 2.0


class Progress:
    """Context manager: report a long task after two seconds, and at its end how long it took.

    If the logger "funcamp" is enabled for INFO, the two messages are logged. Otherwise they go to stderr, on a terminal
    as one line that counts the seconds. Silent if that logger's own level is above INFO, and on every rank of
    torch.distributed except the first.

    Args:
        task: the object of "compiling" in the message.
    """

    def __init__(self, task: str) -> None:
        self.task = task
        self._phase = "tracing"
        self._past_phases: list[tuple[str, float]] = []
        """With the seconds that each took."""
        self._task_start = time.monotonic()
        self._phase_start = self._task_start
        self._done = threading.Event()
        self._has_spoken = False
        self._last_width = 0
        """The number of characters on the terminal's line."""
        self._way = _way()
        self._thread = threading.Thread(target=self._watch, name="funcamp-progress", daemon=True)

    def phase(self, name: str) -> None:
        """Start the next phase of the task."""
        now = time.monotonic()
        self._past_phases.append((self._phase, now - self._phase_start))
        self._phase = name
        self._phase_start = now

    def __enter__(self) -> Progress:
        """Start watching."""
        if self._way is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Report the end, if the start was reported."""
        self._done.set()
        if not self._thread.ident:  # it was never started
            return
        self._thread.join()
        if self._has_spoken:
            self.phase("")  # ends the last one
            phases = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self._past_phases)
            how = "failed" if error is not None else "done"
            self._say(f"jit: {how} after {self._seconds()} ({phases}): {self.task}", last=True)

    def _seconds(self) -> str:
        """Return the time since the task began."""
        return f"{time.monotonic() - self._task_start:.0f} s"

    def _watch(self) -> None:
        """Report a task that takes long; runs in the thread."""
        if self._done.wait(PATIENCE):
            return
        self._has_spoken = True
        if self._way == "live":
            while True:
                self._say(f"jit: {self._phase}, {self._seconds()}: {self.task}")
                if self._done.wait(1.0):
                    return
        self._say(f"jit: {self._phase} {self.task}; once for each batch signature")

    def _say(self, text: str, *, last: bool = False) -> None:
        if self._way == "log":
            _log.info("%s", text)
        elif self._way == "live":
            text = f"funcamp.{text}"[: shutil.get_terminal_size().columns - 1]
            # Spaces cover what is left of a longer line before.
            _print("\r" + text.ljust(self._last_width) + "\n" * last)
            self._last_width = len(text)
        else:
            _print(f"funcamp.{text}\n")


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a closed stream must not break a compilation
        sys.stderr.write(text)
        sys.stderr.flush()


def _way() -> Literal["log", "live", "lines"] | None:
    """Return how to report: to the log, on a line that counts, or in lines; None if not at all."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_rank():
        return None
    if _log.isEnabledFor(logging.INFO):
        return "log"
    if _log.level != logging.NOTSET or _log.disabled or sys.stderr is None or sys.stderr.closed:
        return None
    return "live" if sys.stderr.isatty() else "lines"
