"""Report that a compilation takes long, and how long it took."""

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


@contextlib.contextmanager
def reported(task: str) -> Iterator[None]:
    """Context manager: report a long task after two seconds, and at its end how long it took.

    If the logger "funcamp" is enabled for INFO, the two messages are logged; otherwise they go to stderr. Silent if
    that logger's own level is above INFO, and on every rank of torch.distributed except the first.

    Args:
        task: the object of "preparing" in a message.
    """
    if _is_silent():
        yield
        return
    has_spoken = threading.Event()

    def report_start() -> None:
        has_spoken.set()
        _say(f"jit: preparing {task}; once for each batch signature")

    timer = threading.Timer(PATIENCE, report_start)
    timer.name = "funcamp-progress"
    timer.daemon = True
    start = time.monotonic()
    timer.start()
    how = "failed"
    try:
        yield
        how = "done"
    finally:
        timer.cancel()
        timer.join()
        if has_spoken.is_set():
            _say(f"jit: {how} after {time.monotonic() - start:.0f} s: {task}")


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
