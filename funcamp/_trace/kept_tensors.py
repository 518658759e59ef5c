"""Give values to tensors of a trace that Python keeps, for example in a module's cache.

A trace runs the step's Python on tensors without values. A mask or a table of positions that a module creates at its
first call and keeps is then such a tensor. The part of the graph that created it is computed, and the result is put in
its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from funcamp import _tree, _upstream
from funcamp._memory import Memory
from funcamp._trace.aliases import Aliases, written_arguments
from funcamp._trace.places import Place
from funcamp._trace.tracing import NodeOf

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor
else:
    FakeTensor = _upstream.find("torch._subclasses.fake_tensor.FakeTensor")


def places_with_tensors(places: Iterable[Place], node_of: NodeOf) -> list[Place]:
    """Return the places in which Python keeps tensors of a trace, also in a tuple."""

    def is_of_trace(leaf: object) -> bool:
        return isinstance(leaf, FakeTensor) and node_of(leaf) is not None

    kept: list[Place] = []
    for place in places:
        value = place.now()
        if isinstance(value, (Tensor, tuple)) and any(map(is_of_trace, _tree.leaves(value))):
            kept.append(place)
    return kept


class KeptTensors:
    """Computes what Python keeps of a trace.

    Args:
        root: has the graph's constants.
        graph: the graph.
        node_of: returns the node of a tensor of the graph.
        values: the values of placeholders, and of constants that are not in root.
        constant: placeholders that have the same values at every call.
    """

    def __init__(
        self, root: object, graph: fx.Graph, node_of: NodeOf, values: dict[fx.Node, Any], constant: Set[fx.Node]
    ) -> None:
        self._evaluation = _Evaluation(graph, root, values)
        self._node_of = node_of
        self._changing = self._evaluation.arguments - constant
        self._replaced: dict[int, Tensor] = {}
        """What replaces each tensor, by its id: one tensor may be in several places."""
        self._kept: list[Tensor] = []
        """The tensors that are replaced."""
        self.changing: list[Tensor] = []
        """Those that follow from arguments that change from call to call."""

    def put_values_into(self, places: Iterable[Place]) -> None:
        """Put the values that they have after the step in the place of the trace's tensors."""
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            for place in places:
                leaves, spec = _tree.flatten(place.now())
                place.put(_tree.unflatten([self._with_value(leaf) for leaf in leaves], spec))

    def _with_value(self, leaf: Any) -> Any:
        """Return what takes the place of a tensor of the trace; any other value as it is."""
        node = self._node_of(leaf) if isinstance(leaf, FakeTensor) else None
        if node is None:
            return leaf
        if id(leaf) not in self._replaced:
            needed = self._evaluation.aliases.nodes_behind(node)
            value = self._evaluation.compute(node, needed).detach()
            if self._evaluation.aliases.follows(node, self._changing):
                self.changing.append(value)
            self._kept.append(leaf)
            self._replaced[id(leaf)] = value
        return self._replaced[id(leaf)]


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
