"""One call of the function of torch that starts every backward pass, which can be repeated at other scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from funcamp._types import Args, Kwargs

#: torch's function; it returns the gradients of the inputs.
RunEngine: TypeAlias = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class EngineCall:
    """A call of `torch.autograd._engine_run_backward`, with its arguments by torch's names."""

    run_engine: RunEngine
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

    def run(self, *, keeps_graph: bool) -> object:
        """Run the backward pass; return what torch returns."""
        returned: object = self.run_engine(
            self.outputs,
            self.initial_gradients,
            keeps_graph,
            self.creates_graph,
            self.inputs,
            *self.options,
            **self.named_options,
        )
        return returned

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

    def free_graph(self) -> None:
        """Run the backward pass once more without keeping its graph, for a script that did not keep it either."""
        self.run_engine(
            self.outputs,
            self.initial_gradients,
            False,  # keeps no graph
            False,  # creates no graph of the backward pass
            tuple(self.inputs or leaves_behind(self.outputs)),
            allow_unreachable=True,
            accumulate_grad=False,
        )


def find_obstacle() -> str:
    """Return why a backward pass must not be repeated; empty if it may."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return "other ranks may not repeat it too"
    return ""


def function_behind(outputs: Sequence[Tensor | GradientEdge]) -> str:
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


def leaves_behind(outputs: Sequence[Tensor | GradientEdge]) -> list[Tensor]:
    """Return the leaves that a backward pass from these outputs reaches."""
    # A node with a variable accumulates the gradient of a leaf.
    return [node.variable for node in _nodes_behind(outputs) if hasattr(node, "variable")]


def _nodes_behind(outputs: Sequence[Tensor | GradientEdge]) -> Iterator[Node]:
    """Yield the nodes of the graph of some outputs."""
    seen_nodes = set()
    # An output is a tensor, or a GradientEdge, which has a node.
    stack = [getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in outputs]
    while stack:
        node = stack.pop()
        if node is None or node in seen_nodes:
            continue
        seen_nodes.add(node)
        yield node
        stack.extend([next_node for next_node, _ in node.next_functions])
