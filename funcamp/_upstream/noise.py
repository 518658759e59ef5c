"""What torch logs while a step is traced and compiled, and what means nothing to its user.

Inductor describes the operands of each product with a bias to a process that would time it, which is done with
max_autotune only. A view that has no memory yet cannot be described, so "Constructing input/output tensor meta failed
for Extern Choice" is logged, dozens of times a step (2.11 to 2.15; select_algorithm.py, `ExternKernelCaller`).

An operation on tensors without values that fails, such as a product of shapes that do not fit, is logged with a
traceback of torch's own, before the error itself is raised (2.11 to 2.15; fake_tensor.py).

On a CPU programs are C++ in place of Python (`cpp_wrapper`). Each operation that C++ calls through Python, such as a
Cholesky decomposition, is a warning (2.11 to 2.15; ir.py, `FallbackKernel`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

#: Loggers, each with a part of what is left out.
_NOISE = {
    "torch._inductor.select_algorithm": "tensor meta failed for Extern Choice",
    "torch._inductor.ir": "is missing a c-shim implementation",
    "torch._subclasses.fake_tensor": "failed while attempting to run meta for",
}


def _is_worth_reading(record: logging.LogRecord) -> bool:
    return _NOISE[record.name] not in record.getMessage()


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """Context manager: these are not logged."""
    loggers = [logging.getLogger(name) for name in _NOISE]
    for logger in loggers:
        logger.addFilter(_is_worth_reading)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_worth_reading)
