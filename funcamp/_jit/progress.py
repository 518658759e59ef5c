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
        self.task, self._phase = task, "tracing"
        self._phases: list[tuple[str, float]] = []
        self._began = self._entered = time.monotonic()
        self._done, self._spoken, self._wide = threading.Event(), False, 0
        self._way = _way()
        self._thread = threading.Thread(target=self._watch, name="funcamp-progress", daemon=True)

    def phase(self, name: str) -> None:
        """Start the next phase of the task."""
        now = time.monotonic()
        self._phases.append((self._phase, now - self._entered))
        self._phase, self._entered = name, now

    def __enter__(self) -> Progress:
        """Start watching."""
        if self._way is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Report the end, if the start was reported."""
        self._done.set()
        if not self._thread.ident:
            return
        self._thread.join()
        if self._spoken:
            self.phase("")
            parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self._phases)
            how = "failed" if error is not None else "done"
            self._say(f"jit: {how} after {self._seconds()} ({parts}): {self.task}", last=True)

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._began:.0f} s"

    def _watch(self) -> None:
        if self._done.wait(PATIENCE):
            return
        self._spoken = True
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
            _print("\r" + text.ljust(self._wide) + "\n" * last)
            self._wide = len(text)
        else:
            _print(f"funcamp.{text}\n")


def _print(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a closed stream must not break a compilation
        sys.stderr.write(text)
        sys.stderr.flush()


def _way() -> Literal["log", "live", "lines"] | None:
    ranks = torch.distributed
    if ranks.is_available() and ranks.is_initialized() and ranks.get_rank():
        return None
    if _log.isEnabledFor(logging.INFO):
        return "log"
    if _log.level != logging.NOTSET or _log.disabled or sys.stderr is None or sys.stderr.closed:
        return None
    return "live" if sys.stderr.isatty() else "lines"
