"""The graph of a loss: its nodes, and the backward passes that a step cannot take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.autograd.graph import Node

from funcamp import _tree

#: What a loss with a backward pass inside has to become.
BACKWARD_IN_LOSS = (
    "the loss must not call backward(), neither in the forward pass nor in a gradient hook (as losses that cache "
    "gradients do), because the step differentiates it, once: return the loss without a backward pass of its own, take "
    "torch.autograd.grad for a gradient inside it, and split a batch that is too large by accumulate="
)


def nodes(grad_fn: Node | None, without: Iterable[Node | None] = ()) -> Iterator[Node]:
    """Yield the nodes of an autograd graph.

    Args:
        grad_fn: the last node; None for no graph.
        without: nodes that are left out, and with them what only they lead to.
    """
    seen = set(without)
    waiting: list[Node | None] = [grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [function for function, _ in node.next_functions]
        yield node


def leaves_of(loss: Tensor, without: Iterable[Node | None] = ()) -> Iterator[Tensor]:
    """Yield the tensors on which a loss depends and that are no results of operations: itself, if it is one.

    without: as in `nodes`.
    """
    if loss.grad_fn is None:
        yield loss
    for node in nodes(loss.grad_fn, without):
        # Only the node that accumulates the gradient of a leaf has a variable: the leaf.
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf


def refuse_hooks_beside(call: str, loss: Tensor, inputs: Iterable[Tensor]) -> None:
    """Raise RuntimeError if a loss depends on a tensor that is no input and has a hook, which no backward pass runs.

    Losses that cache gradients return `loss.detach().requires_grad_()` with a hook that calls `backward()`. A step
    differentiates with respect to its inputs, so torch does not come to this tensor.
    """
    input_ids = set(map(id, inputs))
    for leaf in leaves_of(loss):
        if id(leaf) not in input_ids and leaf._backward_hooks:
            raise RuntimeError(f"{call}: {BACKWARD_IN_LOSS}; got a gradient hook on {_tree.describe(leaf)}")
