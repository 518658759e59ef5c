"""A stand-in for a CUDA graph, so that the logic around one can be tested without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.support.helpers import clone


class StandIn:
    """Replays by running the recorded call again into the tensors that its recording returned."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.warm_ups, self.captures = fails, 0, 0

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        before = torch.get_rng_state()
        yield
        torch.set_rng_state(before)

    def warm_up(self, run: Callable[[], Any], times: int) -> None:
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
