"""Report what a long compilation is doing, and how long it took."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator

import torch

_log = logging.getLogger("funcamp")

#: Seconds before the first message.
PATIENCE = 2.0


class Progress:
    """The phases of a task, the first of which is tracing.

    Args:
        task: the object of "compiling" in a message.
    """

    def __init__(self, task: str) -> None:
        self.task = task
        self._phases: list[tuple[str, float]] = []
        """With the time at which each began."""
        self._has_spoken = False
        self.phase("tracing")

    def phase(self, name: str) -> None:
        """Start the next phase of the task."""
        self._phases.append((name, time.monotonic()))

    def report_start(self) -> None:
        """Report a task that takes long; runs in the timer's thread."""
        self._has_spoken = True
        present_phase, _ = self._phases[-1]
        _say(f"jit: {present_phase} {self.task}; once for each batch signature")

    def report_end(self, how: str) -> None:
        """Report the end, if the start was reported."""
        if not self._has_spoken:
            return
        names, starts = zip(*self._phases)
        ends = [*starts[1:], time.monotonic()]
        phases = ", ".join(f"{name} {end - start:.0f} s" for name, start, end in zip(names, starts, ends))
        _say(f"jit: {how} after {ends[-1] - starts[0]:.0f} s ({phases}): {self.task}")


@contextlib.contextmanager
def progress_of(task: str) -> Iterator[Progress]:
    """Context manager: report a long task after two seconds, and at its end how long it took.

    If the logger "funcamp" is enabled for INFO, the two messages are logged; otherwise they go to stderr. Silent if
    that logger's own level is above INFO, and on every rank of torch.distributed except the first.
    """
    progress = Progress(task)
    if _is_silent():
        yield progress
        return
    timer = threading.Timer(PATIENCE, progress.report_start)
    timer.name = "funcamp-progress"
    timer.daemon = True
    timer.start()
    how = "failed"
    try:
        yield progress
        how = "done"
    finally:
        timer.cancel()
        timer.join()
        progress.report_end(how)


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
