"""Operations that no mode sees: neither this library's nor the script's, which may count or change them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from funcamp import _upstream

_without_function_modes = _upstream.find("torch._C.DisableTorchFunction")
_without_dispatch_modes = _upstream.find("torch._C._DisableTorchDispatch")


def check_modes() -> None:
    """Raise RuntimeError if torch cannot leave out modes."""
    _upstream.check(_without_function_modes)
    _upstream.check(_without_dispatch_modes)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Context manager: no mode sees the operations."""
    with _without_function_modes(), _without_dispatch_modes():
        yield
