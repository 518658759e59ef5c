"""Stand-ins for CUDA graphs, so that the logic around them can be tested without a GPU."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from funcamp._jit import cuda_graph
from funcamp._upstream import failed_capture
from tests.support.helpers import clone


class StandIn:
    """Replays by running the recorded call again into the tensors that its recording returned."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.warm_ups, self.captures = fails, 0, 0

    def take_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let `jit` capture by this, on any device."""
        monkeypatch.setattr(cuda_graph, "graphs_for", lambda devices: self)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        before = torch.get_rng_state()
        yield
        torch.set_rng_state(before)

    def warm_up(self, run: Callable[[], object], times: int) -> None:
        with self.kept():
            for _ in range(times):
                run()
                self.warm_ups += 1

    def capture(self, run: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captures += 1
        static = [c.cell_contents for c in run.__closure__ or () if isinstance(c.cell_contents, list)]
        tensors = [t for cell in static for t in cell if isinstance(t, Tensor)]
        with self.kept():
            before = clone(tensors)
            outputs = run()
            for tensor, value in zip(tensors, before):  # a recording executes nothing
                tensor.copy_(value)
        outputs = [torch.full_like(out, -1) for out in outputs]

        def replay() -> None:
            # A replay is no operation of torch's.
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(tensors)):
                for out, value in zip(outputs, run()):
                    out.copy_(value)

        return replay, outputs


class FakeCuda:
    """torch.cuda's streams and graphs without a GPU: a capture with an illegal operation ends as torch's does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream: Any = "default"
        self.recording: list[object] = []
        """The pools that the allocator allocates from."""
        self.drawing = True
        """Whether random numbers can be drawn outside of a capture."""
        self.legal = True
        self.pools = 0
        cuda = self

        class Graph:
            def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
                assert cuda.stream != "default"
                if pool in cuda.recording:
                    raise RuntimeError("already recording to mempool_id")
                self.pool = pool
                cuda.recording.append(pool)
                cuda.drawing, cuda.legal = False, True

            def capture_end(self) -> None:
                if not cuda.legal:
                    cuda.legal = True
                    raise RuntimeError("operation failed due to a previous error during capture")
                cuda.end(0, self.pool)
                cuda.drawing = True

            def replay(self) -> None: ...

        for name, fake in {
            "CUDAGraph": Graph,
            "Stream": lambda device=None: types.SimpleNamespace(device=device),
            "stream": self._on,
            "device": lambda device: contextlib.nullcontext(),
            "synchronize": lambda: None,
            "empty_cache": lambda: None,
            "graph_pool_handle": self._pool,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
        monkeypatch.setattr(failed_capture, "_end_pool", self.end)
        monkeypatch.setattr(failed_capture, "_release_pool", lambda index, pool: None)

    def synchronize(self) -> None:
        """As torch.cuda.synchronize in a capture."""
        self.legal = False
        raise RuntimeError("operation not permitted when stream is capturing")

    def end(self, index: int, pool: object) -> None:
        """As the allocator's endAllocateToPool."""
        if pool not in self.recording:
            raise RuntimeError("not currently recording to mempool_id")
        self.recording.remove(pool)

    @contextlib.contextmanager
    def _on(self, stream: object) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def _pool(self) -> tuple[int, int]:
        self.pools += 1
        return 0, self.pools
