"""Which modules' training flags Python reads: a program has what followed from them when it was traced."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from torch import nn

_lock = threading.Lock()
#: The modules that were read so far, by id, for each thread that records. Without any, `nn.Module` is as torch made it.
_read_in_thread: dict[int, dict[int, nn.Module]] = {}


def _read(module: nn.Module) -> bool:
    """Return a module's flag, and note that it was read."""
    try:
        flag: bool = vars(module)["training"]
    except KeyError:  # of a module whose constructor has not begun
        raise AttributeError("training") from None
    modules = _read_in_thread.get(threading.get_ident())
    if modules is not None:
        modules[id(module)] = module
    return flag


def _write(module: nn.Module, flag: bool) -> None:
    vars(module)["training"] = flag


@contextlib.contextmanager
def recorded_flags() -> Iterator[dict[int, nn.Module]]:
    """Context manager: the modules whose flags this thread reads, by id. Those that a scripted module reads are not in it.

    A property of a class comes before what is in an object's dict, so every read in Python is seen, in torch's code too.
    """
    thread = threading.get_ident()
    modules: dict[int, nn.Module] = {}
    with _lock:
        if not _read_in_thread:
            nn.Module.training = property(_read, _write)  # type: ignore[assignment]
        _read_in_thread[thread] = modules
    try:
        yield modules
    finally:
        with _lock:
            del _read_in_thread[thread]
            if not _read_in_thread:
                del nn.Module.training


@contextlib.contextmanager
def own_flags() -> Iterator[None]:
    """Context manager: the step itself sets the flags, so that nothing follows from what they were before."""
    thread = threading.get_ident()
    modules = _read_in_thread.get(thread)
    known = {} if modules is None else dict(modules)
    try:
        yield
    finally:
        if modules is not None:
            modules.clear()
            modules |= known
