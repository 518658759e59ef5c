"""Which modules' training flags Python reads: a program has what followed from them when it was traced."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import fx, nn

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
    # Such as the body of a scan, whose tensors have no values.
    is_made_by_trace = type(module) is nn.Module or isinstance(module, fx.GraphModule)
    if modules is not None and not is_made_by_trace:
        modules[id(module)] = module
    return flag


def _write(module: nn.Module, flag: bool) -> None:
    vars(module)["training"] = flag


@contextlib.contextmanager
def recorded_flags() -> Iterator[dict[int, nn.Module]]:
    """Context manager: the modules whose flags this thread reads, by id; not those that a scripted module reads.

    A property of a class comes before what is in an object's dict, so every read in Python is seen, also torch's.
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
    if torch.compiler.is_dynamo_compiling():  # it knows no threads; nothing is recorded there
        yield
        return
    modules = _read_in_thread.get(threading.get_ident())
    known = {} if modules is None else dict(modules)
    try:
        yield
    finally:
        if modules is not None:
            modules.clear()
            modules |= known
