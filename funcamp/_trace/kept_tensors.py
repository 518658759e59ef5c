"""Give values to tensors of a trace that Python keeps, for example in a module's cache.

A trace runs the step's Python on tensors without values. A mask or a table of positions that a module creates at its
first call and keeps is then such a tensor. The part of the graph that created it is computed, and the result replaces
it.
"""

from __future__ import annotations

import gc
import logging
import types
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, fx

from funcamp import _tree, _upstream
from funcamp._memory import Memory
from funcamp._trace.aliases import Aliases, written_arguments

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor
else:
    FakeTensor = _upstream.find("torch._subclasses.fake_tensor.FakeTensor")

_log = logging.getLogger("funcamp")


class KeptTensor(NamedTuple):
    """A tensor of a trace that Python keeps."""

    tensor: Tensor
    node: fx.Node


class _Replacement(NamedTuple):
    """A tensor of a trace that Python keeps, and the one with values that takes its place."""

    tensor: Tensor
    value: Tensor


def give_values(
    kept_tensors: list[KeptTensor],
    root: object,
    values: dict[fx.Node, object],
    *,
    failed: bool,
    constant: Set[fx.Node] = frozenset(),
) -> list[Tensor]:
    """Give tensors of a trace the values that they have after the step; return those that a later call may change.

    Args:
        kept_tensors: the tensors that still exist, and their nodes; empty afterwards.
        root: has the graph's constants.
        values: values of placeholders, and of constants that are not in root; afterwards of what was computed, too.
        failed: whether the trace failed. Its frames then still exist, so only tensors that depend on no argument count.
        constant: placeholders that have the same values at every call.

    Raises:
        RuntimeError: a tensor is referenced from a place in which it cannot be replaced.
    """
    evaluation = _Evaluation(kept_tensors[0].node.graph, root, values)
    changing = evaluation.arguments - constant
    ids_of_changing: set[int] = set()
    redrawn: list[str] = []
    replacements: list[_Replacement] = []
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        for tensor, node in kept_tensors:
            needed = evaluation.aliases.nodes_behind(node)
            if any(map(evaluation.is_from_outside, needed)):
                if failed:
                    continue
                if evaluation.aliases.follows(node, changing):
                    ids_of_changing.add(id(tensor))
            elif any(map(_draws_numbers, needed)):
                redrawn.append(_tree.describe(tensor))
            replacements.append(_Replacement(tensor, _like(tensor, evaluation.compute(node, needed))))
    # A reference from here to a tensor would be in the way of its replacement.
    kept_tensors.clear()
    del tensor
    replaced, unreplaced = _replace(replacements)
    if not failed and redrawn:
        log_kept("are random, and a program draws them anew at every call: make them before the first call", redrawn)
    if not failed and unreplaced is not None:
        raise RuntimeError(
            f"jit: step must not keep {_tree.describe(unreplaced)} in Python where no other can take its place (a "
            "tuple, an object of C): make it before the first call, or return it in the metrics"
        )
    return [value for id_before, value in replaced if id_before in ids_of_changing]


def log_kept(what: str, descriptions: list[str]) -> None:
    """Log that Python keeps tensors of the step, and what becomes of them."""
    _log.warning("jit: Python keeps tensors of the step that %s: %s", what, join_first(descriptions))


def join_first(descriptions: list[str]) -> str:
    """Return the first four descriptions as one text, and dots for others."""
    shown = descriptions[:4]
    return ", ".join(shown if len(descriptions) == len(shown) else [*shown, "..."])


class _Evaluation:
    """Computes single nodes of a graph.

    Args:
        graph: the graph.
        root: has the graph's constants.
        values: the values that are known; those that are computed are added.
    """

    def __init__(self, graph: fx.Graph, root: object, values: dict[fx.Node, Any]) -> None:
        self.aliases = Aliases(graph)
        self.arguments = {node for node in values if node.op == "placeholder"}
        self._graph = graph
        self._root = root
        self._values = values
        self._argument_memory = Memory(values[node] for node in self.arguments)

    def compute(self, node: fx.Node, needed: Set[fx.Node]) -> Any:
        """Return the value of a node after the step, in memory that no argument has.

        Args:
            node: the node.
            needed: the nodes that its value depends on, and itself.
        """
        for other in self._graph.nodes:  # in the order of the graph, as some write what others read
            if other in needed and other not in self._values:
                self._values[other] = self._run(other)
        value = self._values[node]
        is_strided = value.layout == torch.strided  # other layouts have no address
        if is_strided and self._argument_memory.meets(value):
            return value.clone()
        return value

    def is_from_outside(self, node: fx.Node) -> bool:
        """Return whether a value comes from outside of the graph: from an argument, or from the graph around it."""
        if node.op == "placeholder":
            return True
        return node.op == "get_attr" and isinstance(getattr(self._root, str(node.target), None), FakeTensor)

    def _run(self, node: fx.Node) -> Any:
        """Compute a node from the values of its arguments."""
        if node.op == "get_attr":
            return getattr(self._root, str(node.target))
        values: dict[fx.Node, Any] = {argument: self._values[argument] for argument in node.all_input_nodes}
        for argument in written_arguments(node):
            if self.aliases.root[argument].op != "call_function":  # clone, so that no tensor of a user is written
                values[argument] = values[argument].clone()
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
        operation: Any = node.target
        return operation(*args, **kwargs)


def _draws_numbers(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    """Return a tensor with these values that is a parameter, or requires a gradient, if a tensor of the trace does."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(value, tensor.requires_grad)
    return value.detach().requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _replace(replacements: list[_Replacement]) -> tuple[list[tuple[int, Tensor]], Tensor | None]:
    """Replace tensors by others with values, wherever Python keeps them.

    Args:
        replacements: the tensors; empty afterwards.

    Returns:
        For each tensor its former id, and the tensor that is now in its place; a tensor that could not be replaced.
    """
    replaced = _swap(replacements)
    if not replacements:
        return replaced, None
    # torch 2.15 refers weakly to tensors of a branch, which cannot be swapped: their holders get the values.
    values = {id(tensor): value for tensor, value in replacements}
    tensors = [tensor for tensor, _ in replacements]
    replacements.clear()
    replaced += values.items()
    for holder in gc.get_referrers(*tensors):
        if holder is not tensors:
            _put_values_into(holder, values)
    for tensor in tensors:
        if _has_holder_besides(tensor, tensors):
            return replaced, tensor
    return replaced, None


def _swap(replacements: list[_Replacement]) -> list[tuple[int, Tensor]]:
    """Swap tensors of a trace for those with values; leave those in the list that torch cannot swap.

    Returns:
        For each swapped tensor its id, and the tensor itself, which now has values.
    """
    swapped: list[tuple[int, Tensor]] = []
    count_before = -1
    while replacements and len(replacements) != count_before:
        count_before = len(replacements)
        refused: list[_Replacement] = []
        while replacements:  # from the last: views first; afterwards nothing refers to their bases
            replacement = replacements.pop()
            try:
                torch.utils.swap_tensors(*replacement)  # type: ignore[no-untyped-call]
            except RuntimeError:
                refused.append(replacement)
            else:
                swapped.append((id(replacement.tensor), replacement.tensor))
        replacements += refused
    return swapped


def _put_values_into(holder: Any, values: Mapping[int, Tensor]) -> None:
    """Replace tensors in what holds them, if that is a dict, a list or a variable of a closure.

    Args:
        holder: what refers to some of the tensors.
        values: what replaces each of them, by the tensor's id.
    """
    if isinstance(holder, dict):
        for key, item in list(holder.items()):
            if id(item) in values:
                holder[key] = values[id(item)]
    elif isinstance(holder, list):
        for index, item in enumerate(holder):
            if id(item) in values:
                holder[index] = values[id(item)]
    elif isinstance(holder, types.CellType):
        holder.cell_contents = values[id(holder.cell_contents)]


def _has_holder_besides(tensor: Tensor, known_holder: object) -> bool:
    """Return whether anything but a known holder and running functions refers to a tensor."""
    for holder in gc.get_referrers(tensor):
        if holder is not known_holder and not isinstance(holder, types.FrameType):
            return True
    return False
