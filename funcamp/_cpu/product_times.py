"""Which of two ways of computing a float32 matrix product is faster on this machine."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from itertools import product as product_of
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcamp._cpu.product_kernel import BLOCK, split_of

#: `at::native::cpublas::brgemm` of float32, by the name that compilers on Linux give it.
_SYMBOL = "_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb"
#: Seconds for which each way is measured at least.
_MIN_SECONDS = 2e-3
#: The number of times that each way is measured at least.
_MIN_TIMES = 3
#: Seconds from which on a first call is not repeated.
_LONG_SECONDS = 0.05


class Product(NamedTuple):
    """A product of an m x k and a k x n matrix."""

    m: int
    k: int
    n: int
    threads: int


@functools.cache
def kernel_is_faster(product: Product) -> bool:
    """Return whether a program computes a product sooner by a kernel than by a call of torch's.

    The kernel takes the time of one thread's share. The copy that it needs of a transposed factor is not counted: in a
    program it is mostly part of another loop, as the operations that follow are part of the kernel's. With it, kernels
    were refused that made PPO's and SAC's updates a seventh and a fifth faster.
    """
    brgemm = _brgemm()
    if brgemm is None:
        return False
    left = torch.zeros(product.m, product.k)
    right = torch.zeros(product.n, product.k).t()
    out = torch.empty(product.m, product.n)
    with torch.no_grad():
        seconds_of_torch = _least_seconds(lambda: torch.mm(left, right, out=out))
    split = split_of(product.m, product.n, product.k, product.threads)
    share_left = torch.zeros(split.rows, product.k)
    share_right = torch.zeros(product.k, product.n)
    share_out = torch.empty(split.rows, product.n)
    seconds_of_kernel = _least_seconds(lambda: multiply(brgemm, share_left, share_right, share_out))
    return seconds_of_kernel < seconds_of_torch


def multiply(brgemm: Any, left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write the product of two contiguous matrices into a third, in the blocks of `product_kernel`."""
    m, k = left.shape
    n = right.shape[1]
    item_size = 4  # float32
    for i, j, term in product_of(range(0, m, BLOCK), range(0, n, BLOCK), range(0, k, BLOCK)):
        brgemm(
            min(BLOCK, m - i),
            min(BLOCK, n - j),
            min(BLOCK, k - term),
            k,
            n,
            n,
            term > 0,
            left.data_ptr() + item_size * (i * k + term),
            right.data_ptr() + item_size * (term * n + j),
            out.data_ptr() + item_size * (i * n + j),
            False,
        )


def _least_seconds(call: Callable[[], object]) -> float:
    """Return the shortest time that a call took, after a first one; of a long call, the time of the first."""
    seconds_of_first = _seconds(call)
    if seconds_of_first > _LONG_SECONDS:
        return seconds_of_first
    times: list[float] = []
    while len(times) < _MIN_TIMES or sum(times) < _MIN_SECONDS:
        times.append(_seconds(call))
    return min(times)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@functools.cache
def _brgemm() -> Any:
    """Return the function of torch that the kernel calls, or None if there is none by that name."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        brgemm = getattr(ctypes.CDLL(str(path)), _SYMBOL)
    except (OSError, AttributeError):
        return None
    brgemm.restype = None
    brgemm.argtypes = [*[ctypes.c_int64] * 6, ctypes.c_bool, *[ctypes.c_void_p] * 3, ctypes.c_bool]
    return brgemm


def is_available() -> bool:
    """Return whether this torch has the function that the kernel calls."""
    return _brgemm() is not None
