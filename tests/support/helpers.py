"""Comparisons and small models that several tests use."""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree


def clone(tree: object) -> Any:
    """A pytree with its tensors cloned."""
    return _pytree.tree_map_only(Tensor, lambda leaf: leaf.detach().clone(), tree)


def values_of(model: torch.nn.Module) -> dict[str, Any]:
    """A module's own parameters and buffers by name; its `state_dict` warns if a state has moved on without it."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def to(tree: object, device: str) -> Any:
    """A pytree with its tensors moved."""
    return _pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), tree)


def bits(leaf: Tensor) -> Tensor:
    """A tensor as integers, so that NaN equals NaN and -0.0 differs from 0.0."""
    if leaf.layout == torch.sparse_coo:
        leaf = leaf.coalesce()
        return torch.cat([leaf.indices().flatten(), bits(leaf.values()).flatten()])
    if leaf.is_complex():
        leaf = torch.view_as_real(leaf)
    if not leaf.is_floating_point():
        return leaf
    return leaf.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[leaf.dtype.itemsize])


def assert_same(actual: object, expected: object) -> None:
    """Equal structure, dtypes, shapes and bits."""
    flat_a, spec_a = _pytree.tree_flatten(actual)
    flat_e, spec_e = _pytree.tree_flatten(expected)
    assert spec_a == spec_e
    for index, (a, e) in enumerate(zip(flat_a, flat_e)):
        if not isinstance(a, Tensor):
            assert a == e
            continue
        assert (a.dtype, a.shape, a.layout) == (e.dtype, e.shape, e.layout), f"leaf {index}: {a} against {e}"
        assert torch.equal(bits(a), bits(e)), f"leaf {index}: {a} against {e}"


def difference(actual: object, expected: object) -> float:
    """The largest relative difference of a leaf: norm of the difference over norm of the expected."""
    flat_a, flat_e = _pytree.tree_leaves(actual), _pytree.tree_leaves(expected)
    assert len(flat_a) == len(flat_e)
    worst = 0.0
    for a, e in zip(flat_a, flat_e):
        if a is not None and a.numel():
            if a.is_complex():
                a, e = torch.view_as_real(a), torch.view_as_real(e)
            a, e = a.detach().double(), e.detach().double()
            found = ((a - e).norm() / e.norm().clamp(min=1e-30)).item()
            worst = max(worst, math.inf if math.isnan(found) else found)  # max(0.0, nan) is 0.0
    return worst


def assert_close(actual: object, expected: object, relative: float) -> None:
    """Every leaf within a fraction of its norm, or bit for bit if that is 0; the message has the number measured."""
    if not relative:
        assert_same(actual, expected)
        return
    measured = difference(actual, expected)
    assert measured <= relative, f"differs by {measured:.3g} relative, more than {relative:.3g}"


def together(work: Callable[[int], None], threads: int) -> None:
    """Run work(0), work(1), ... in threads that begin at once; raise what the first that fails raises."""
    ready, errors = threading.Barrier(threads), []

    def run(index: int) -> None:
        try:
            ready.wait(60)
            work(index)
        except BaseException as error:  # raised below
            errors.append(error)

    started = [threading.Thread(target=run, args=(index,)) for index in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]


def assert_refused(call: Callable[[], object], error: type[Exception], words: str) -> None:
    """A row of a table of refusals: the call raises this error, whose text has these words, a pattern."""
    with pytest.raises(error, match=f"(?s){words}"):
        call()


@contextlib.contextmanager
def assert_silent() -> Iterator[None]:
    """Fail at a UserWarning, the category of the library's, whatever the filters of the test are."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@contextlib.contextmanager
def assert_no_sync() -> Iterator[None]:
    """Raise where the host waits for the GPU."""
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Two threads wait for each other at every small product: seven times as long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
