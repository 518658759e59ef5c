"""One call of the function of torch that starts every backward pass, which can be repeated at other scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from funcamp._types import Args, Kwargs
from funcamp.numerics.report.backward_passes import leaves_behind


@dataclasses.dataclass(frozen=True)
class EngineCall:
    """A call of `torch.autograd._engine_run_backward`, with its arguments by torch's names."""

    run_engine: Callable[..., Any]
    outputs: Sequence[Tensor | GradientEdge]
    initial_gradients: Sequence[Tensor | None]
    keeps_graph: bool
    creates_graph: bool
    inputs: Sequence[Tensor | GradientEdge]
    """The tensors to differentiate with respect to; empty for all leaves, whose `.grad` gets the gradients."""
    options: Args
    named_options: Kwargs

    @property
    def initial_dtypes(self) -> list[torch.dtype]:
        """The dtypes of the initial gradients."""
        return [gradient.dtype for gradient in self.initial_gradients if isinstance(gradient, Tensor)]

    def run(self, *, keeps_graph: bool) -> Any:
        """Run the backward pass; return what torch returns."""
        return self.run_engine(
            self.outputs,
            self.initial_gradients,
            keeps_graph,
            self.creates_graph,
            self.inputs,
            *self.options,
            **self.named_options,
        )

    def repeat(self, factor: float) -> Sequence[Tensor | None]:
        """Run the backward pass with its initial gradients times a factor; return the gradients.

        The graph must have been kept. The gradients are returned and not accumulated in `.grad`: for this, torch must
        get the inputs.
        """
        with torch.no_grad():
            scaled_gradients = tuple(
                [None if gradient is None else gradient * factor for gradient in self.initial_gradients]
            )
        all_inputs = tuple(self.inputs or leaves_behind(self.outputs))
        gradients: Sequence[Tensor | None] = self.run_engine(
            self.outputs,
            scaled_gradients,
            True,  # keeps the graph
            False,  # creates no graph of the backward pass
            all_inputs,
            allow_unreachable=True,
            accumulate_grad=False,
        )
        return gradients
