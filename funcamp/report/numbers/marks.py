"""A copy of a tensor in a graph, at which a recorder counts the tensor and its gradient."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.autograd import Function


class MarkingRecorder(Protocol):
    """What counts at a mark."""

    def mark(self, x: Tensor, path: str, *, backward: bool) -> Tensor:
        """Copy and count a module's output, or its gradient."""


def mark(x: Tensor, recorder: MarkingRecorder, path: str) -> Tensor:
    """Return a copy of a module's output that the recorder counts now, and whose gradient it counts later."""
    marked: Tensor = _Mark.apply(x, recorder, path)  # type: ignore[no-untyped-call]
    return marked


class _MarkContext(Protocol):
    """What a mark keeps for its backward pass."""

    recorder: MarkingRecorder
    path: str


class _Mark(Function):
    """Count a tensor in the forward pass, and its gradient in the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, recorder: MarkingRecorder, path: str) -> Tensor:
        return recorder.mark(x, path, backward=False)

    @staticmethod
    def setup_context(
        ctx: _MarkContext,
        inputs: tuple[Tensor, MarkingRecorder, str],
        output: Tensor,  # noqa: ARG004
    ) -> None:
        _, ctx.recorder, ctx.path = inputs

    @staticmethod
    def backward(ctx: _MarkContext, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.recorder.mark(grad, ctx.path, backward=True), None, None

    @staticmethod
    def jvp(ctx: _MarkContext, tangent: Tensor, *_: None) -> Tensor:  # noqa: ARG004
        return tangent.clone()
