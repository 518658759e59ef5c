"""What torch leaves behind if the capture of a CUDA graph fails, and how to clear it.

`CUDAGraph.capture_end` raises before it ends what `capture_begin` began, once an operation inside was illegal (2.11 to
2.15). The allocator then goes on recording to the graph's pool: the next capture into it fails. Until 2.12 the default
generator also believes that it is captured, and every later random number fails with "Offset increment outside graph
capture encountered unexpectedly".
"""

from __future__ import annotations

import contextlib

import torch

from funcamp._upstream import find

_end_pool = find("torch._C._cuda_endAllocateToPool")
_release_pool = find("torch._C._cuda_releasePool")

#: The allocators keep a pointer to a graph whose capture failed.
_failed: list[object] = []


def clear(graph: torch.cuda.CUDAGraph, device: torch.device, pool: tuple[int, int]) -> None:
    """End the capture of a graph that failed, on the stream it was captured on; do not use the pool again.

    Args:
        graph: its capture began.
        device: its device, the current one.
        pool: the pool that it was given.
    """
    with contextlib.suppress(Exception):  # the caller raises what made the capture fail
        graph.capture_end()
    with contextlib.suppress(RuntimeError):  # capture_end came so far: nothing is left behind
        _end_pool(device.index, pool)
        _release_pool(device.index, pool)
        _failed.append(graph)
        other = torch.cuda.CUDAGraph()  # a capture that ends well ends the generator's too
        other.capture_begin(capture_error_mode="thread_local")
        torch.zeros((), device=device)
        other.capture_end()
