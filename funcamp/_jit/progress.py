"""Report what a long compilation is doing, and how long it took."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from types import TracebackType

import torch

_log = logging.getLogger("funcamp")

#: Seconds before the first message.
PATIENCE = 2.0


class Progress:
    """Context manager: report a long task after two seconds, and at its end how long it took.

    If the logger "funcamp" is enabled for INFO, the two messages are logged; otherwise they go to stderr. Silent if
    that logger's own level is above INFO, and on every rank of torch.distributed except the first.

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
        self._has_spoken = False
        self._timer = threading.Timer(PATIENCE, self._report_start)
        self._timer.name = "funcamp-progress"
        self._timer.daemon = True

    def phase(self, name: str) -> None:
        """Start the next phase of the task."""
        now = time.monotonic()
        self._past_phases.append((self._phase, now - self._phase_start))
        self._phase = name
        self._phase_start = now

    def __enter__(self) -> Progress:
        """Start watching."""
        if not _is_silent():
            self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Report the end, if the start was reported."""
        if self._timer.ident is None:  # it was never started
            return
        self._timer.cancel()
        self._timer.join()
        if self._has_spoken:
            self.phase("")  # ends the last one
            phases = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self._past_phases)
            how = "failed" if error is not None else "done"
            _say(f"jit: {how} after {time.monotonic() - self._task_start:.0f} s ({phases}): {self.task}")

    def _report_start(self) -> None:
        """Report a task that takes long; runs in the timer's thread."""
        self._has_spoken = True
        _say(f"jit: {self._phase} {self.task}; once for each batch signature")


def _is_silent() -> bool:
    """Return whether nothing is to be reported."""
    distributed = torch.distributed
    is_another_rank = distributed.is_available() and distributed.is_initialized() and distributed.get_rank() > 0
    return is_another_rank or _log.disabled or _log.level > logging.INFO


def _say(text: str) -> None:
    if _log.isEnabledFor(logging.INFO):
        _log.info("%s", text)
        return
    # A stream that is closed, or None, must not break a compilation.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"funcamp.{text}\n")
        sys.stderr.flush()
