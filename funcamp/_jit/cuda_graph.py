"""A compiled step in one CUDA graph: static storage, warm-up on clones, capture, replay."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from funcamp import _upstream
from funcamp._dtensor import local
from funcamp._jit.passes.program import TensorFunction
from funcamp._upstream.failed_capture import clear

_WARM_UPS = 3


def own_workspaces() -> contextlib.AbstractContextManager[object]:
    """Context manager around a capture: the memory that cuBLAS works in is in the graph's pool, and no other's.

    cuBLAS keeps it for each stream.
    """
    # Looked up here because it takes a second to import.
    manager = _upstream.find("torch._inductor.cudagraph_trees.clear_cublas_manager", contextlib.nullcontext)
    around: contextlib.AbstractContextManager[object] = manager()
    return around


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Context manager: Python collects no garbage. It might free another graph, which is illegal in a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CudaGraphs:
    """torch.cuda's graphs, in one memory pool and on one stream: memory of another stream is not reused."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def warm_up(self, run: Callable[[], Any], times: int) -> None:
        """Run some times on the stream of the capture, because lazy initialization must not happen in the capture."""
        with torch.random.fork_rng([self._device]), torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(self._stream):
                    for _ in range(times):
                        run()
            finally:
                torch.cuda.synchronize()

    def capture(self, run: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        """Record a run without executing it; return its replay function and the tensors that a replay fills.

        Other threads (a loader that pins memory) may continue.
        torch.cuda.graph is not used: its stream is the same for all devices, and stays current if the capture fails.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            try:
                with _no_collection(), own_workspaces():
                    graph.capture_begin(self._pool, capture_error_mode="thread_local")
                    outputs = run()
                    graph.capture_end()
            except BaseException:
                failed_pool = self._pool
                self._pool = torch.cuda.graph_pool_handle()
                clear(graph, self._device, failed_pool)
                raise
        return graph.replay, outputs

    def wait(self) -> None:
        """Wait until the device has done all replays."""
        torch.cuda.synchronize(self._device)


def graphs_for(devices: list[torch.device]) -> CudaGraphs | None:
    """Return the capture interface of the device of a state's leaves; None if it has none.

    Raises:
        RuntimeError: the leaves are on several GPUs; a graph would contain the kernels of one of them.
    """
    distinct_devices = list(dict.fromkeys(devices))
    if not distinct_devices or distinct_devices[0].type != "cuda":
        return None
    if len(distinct_devices) > 1:
        names = ", ".join(map(str, distinct_devices))
        raise RuntimeError(f"jit: state must be on one device to be captured; got {names}: pass capture=False")
    return CudaGraphs(distinct_devices[0])


class CudaGraphedProgram:
    """The graph of one batch signature, with its static batch and results."""

    def __init__(
        self,
        graphs: CudaGraphs,
        run: TensorFunction,
        state: list[Tensor],
        batch: list[Tensor],
    ) -> None:
        """Warm up on clones and capture; no input keeps a write, even if this fails.

        Args:
            graphs: captures and replays.
            run: the compiled function of state and batch.
            state: its static storage.
            batch: tensors like those of every later call.

        Raises:
            RuntimeError: the capture failed.
        """
        self.inner = run
        """The compiled function. A graph keeps no memory that it reads, such as a program's constants."""
        self._batch = [leaf.to(state[0].device).clone() for leaf in batch]
        self._batch_memory = [local(leaf) for leaf in self._batch]
        state = [leaf.detach() for leaf in state]  # separate references to the static storage
        self._state = state

        def run_on(state_values: list[Tensor]) -> list[Tensor]:
            """Return the results."""
            return run([*state_values, *self._batch])

        def run_on_state() -> list[Tensor]:
            """Return the same of the state."""
            return run_on(state)

        clones = [leaf.clone() for leaf in state]
        graphs.warm_up(functools.partial(run_on, clones), _WARM_UPS)
        del clones
        try:
            self._replay, self._results = graphs.capture(run_on_state)
        except Exception as error:
            raise RuntimeError(
                f"jit: the step could not be captured into one CUDA graph: {error}. capture=False calls the program "
                "without a graph"
            ) from error
        #: The results of each dtype, which are copied together: their numbers, and their memory.
        self._copied_together: defaultdict[torch.dtype, tuple[list[int], list[Tensor]]] = defaultdict(lambda: ([], []))
        for number, result in enumerate(self._results):
            numbers, parts = self._copied_together[result.dtype]
            numbers.append(number)
            parts.append(local(result))

    def __call__(self, values: list[Tensor]) -> list[Tensor]:
        """Copy the batch in, replay, and return results that later calls do not change. No sync.

        Args:
            values: the state, which is in its static storage, and a batch.
        """
        if batch := values[len(self._state) :]:
            _upstream.copy_each(self._batch_memory, [local(leaf) for leaf in batch], non_blocking=True)
        self._replay()
        torch.autograd.graph.increment_version(self._state)  # torch's operations do this, a replay does not
        copies = [torch.empty_like(result) for result in self._results]
        # A step has a dozen scalars. One by one their copies take the device, and the host, as long as small kernels.
        for numbers, parts in self._copied_together.values():
            _upstream.copy_each([local(copies[number]) for number in numbers], parts)
        return copies
