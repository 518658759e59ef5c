"""One call of the function of torch that starts every backward pass, which can be repeated at other scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from funcamp.report.autograd_graph import nodes_from
from funcamp.report.torch_names import run_engine

Edges: TypeAlias = Sequence[Tensor | GradientEdge]


@dataclasses.dataclass(frozen=True)
class EngineCall:
    """A call of `torch.autograd._engine_run_backward`, with its arguments by torch's names."""

    outputs: Edges
    initial_gradients: Sequence[Tensor | None]
    keeps_graph: bool
    creates_graph: bool
    inputs: Edges
    """The tensors to differentiate with respect to; empty for all leaves, whose `.grad` gets the gradients."""
    options: tuple[Any, ...]
    named_options: dict[str, Any]

    @property
    def initial_dtypes(self) -> list[torch.dtype]:
        """The dtypes of the initial gradients."""
        return [gradient.dtype for gradient in self.initial_gradients if isinstance(gradient, Tensor)]

    def run(self, *, keeps_graph: bool) -> object:
        """Run the backward pass; return what torch returns."""
        arguments = self.outputs, self.initial_gradients, keeps_graph, self.creates_graph, self.inputs
        result: object = run_engine(*arguments, *self.options, **self.named_options)
        return result

    def repeat(self, factor: float, *, keeps_graph: bool = True) -> Sequence[Tensor | None]:
        """Run the backward pass with its initial gradients times a factor; return the gradients.

        The graph must have been kept. The gradients are returned and not accumulated in `.grad`: for this, torch must
        get the inputs.
        """
        with torch.no_grad():
            scaled = tuple([None if gradient is None else gradient * factor for gradient in self.initial_gradients])
        gradients: Sequence[Tensor | None] = run_engine(
            self.outputs,
            scaled,
            keeps_graph,
            False,  # creates no graph of the backward pass
            tuple(self.inputs or leaves_behind(self.outputs)),
            allow_unreachable=True,
            accumulate_grad=False,
        )
        return gradients


def find_obstacle() -> str:
    """Return why a backward pass must not be repeated; empty if it may."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return "other ranks may not repeat it too"
    return ""


def function_behind(outputs: Edges) -> str:
    """Return the name of an autograd.Function in the graph of some outputs that is not this library's; empty if none.

    A backward pass runs its code, which may draw, count or compute a part of the model again.
    """
    for node in _nodes_behind(outputs):
        if isinstance(node, BackwardCFunction):
            function_class = type(node)._forward_cls
            if not function_class.__module__.startswith("funcamp."):
                return str(function_class.__name__)
        elif "CppNode" in node.name():
            return node.name()
    return ""


def leaves_behind(outputs: Edges) -> list[Tensor]:
    """Return the leaves that a backward pass from these outputs reaches."""
    # A node with a variable accumulates the gradient of a leaf.
    return [node.variable for node in _nodes_behind(outputs) if hasattr(node, "variable")]


def _nodes_behind(outputs: Edges) -> Iterator[Node]:
    """Yield the nodes of the graph of some outputs."""
    # An output is a tensor, or a GradientEdge, which has a node.
    return nodes_from(getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in outputs)
