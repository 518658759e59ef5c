"""A warning that Inductor logs for every product with a bias that is part of a flat vector, and that means nothing.

It describes the operands of each product to a process that would time it, which is done with max_autotune only. A view
that has no memory yet cannot be described, so "Constructing input/output tensor meta failed for Extern Choice" is
logged, dozens of times a step (2.11 to 2.15; select_algorithm.py, `ExternKernelCaller`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

_LOGGER = "torch._inductor.select_algorithm"
_TEXT = "tensor meta failed for Extern Choice"


def _is_worth_reading(record: logging.LogRecord) -> bool:
    return _TEXT not in record.getMessage()


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """Context manager: that warning is not logged."""
    logger = logging.getLogger(_LOGGER)
    logger.addFilter(_is_worth_reading)
    try:
        yield
    finally:
        logger.removeFilter(_is_worth_reading)
