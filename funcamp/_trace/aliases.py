"""Which nodes of a traced graph share memory, and which nodes write it, by the operations' schemas."""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set

import torch
from torch import fx

from funcamp import _tree
from funcamp._trace.schema import aliased, reads_no_value
from funcamp._upstream.chains import nodes_behind

_aten = torch.ops.aten
#: In training they write their running mean and variance, which torch's schema does not declare.
_BATCH_NORMS = {_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default, _aten.miopen_batch_norm.default}
#: Operations whose result has the values of their first argument.
_REPEATS = {_aten.clone.default, _aten.detach.default, _aten.alias.default}


class Aliases:
    """The memory that each node of a graph refers to, and the nodes that write to it.

    Args:
        graph: the graph.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.root: dict[fx.Node, fx.Node] = {}
        """For every node the node that allocated its memory: itself, or the node that it is a view of."""
        self.writers: dict[fx.Node, list[fx.Node]] = {}
        """By root, the nodes that write to its memory."""
        for node in graph.nodes:
            self.root[node] = self._root_of(node)
            for written in written_arguments(node):
                self.writers.setdefault(self.root[written], []).append(node)

    def _root_of(self, node: fx.Node) -> fx.Node:
        """Return the node that made the memory of a node, from the roots of the nodes before it."""
        if node.target is operator.getitem:
            return self.root[node.all_input_nodes[0]]
        schema = getattr(node.target, "_schema", None)
        if schema is None or not any(result.alias_info for result in schema.returns):
            return node
        sources = _nodes_in(aliased(node.target, node.args, node.kwargs))
        return self.root[sources[0]] if sources else node

    def nodes_behind(self, *nodes: fx.Node) -> set[fx.Node]:
        """Return nodes, everything that they are computed from, and everything that writes to any of these.

        Inputs count with the values that they have before the graph runs.
        """

        def sources_of(node: fx.Node) -> list[fx.Node]:
            return [*node.all_input_nodes, *self._writers_of_made(node)]

        return nodes_behind([*nodes], sources_of)

    def writers_of_inputs(self) -> set[fx.Node]:
        """Return the nodes that write to memory that the graph does not make."""
        return {writer for root, writers in self.writers.items() if root.op != "call_function" for writer in writers}

    def follows(self, node: fx.Node, inputs: Set[fx.Node]) -> bool:
        """Return whether the values of a node depend on those of one of these inputs."""

        def sources_of_values(node: fx.Node) -> list[fx.Node]:
            sources = [] if reads_no_value(node.target) else node.all_input_nodes
            return [*sources, *self._writers_of_made(node)]

        return not inputs.isdisjoint(nodes_behind([node], sources_of_values))

    def changed_inputs(self, inputs: Sequence[fx.Node], results: Sequence[fx.Node]) -> set[fx.Node]:
        """Return the inputs that the graph writes other values to, or returns with other values.

        Args:
            inputs: the inputs.
            results: what the graph returns for the first of them.
        """
        changed: set[fx.Node] = set()
        for node, result in zip(inputs, results):
            if self._values_of(result) is not node:
                changed.add(node)
        for node in inputs:
            if any(not self._writes_same_values(writer, node) for writer in self.writers.get(node, ())):
                changed.add(node)
        return changed

    def _writes_same_values(self, writer: fx.Node, node: fx.Node) -> bool:
        """Return whether an operation copies the values of a node into itself."""
        if writer.target is not _aten.copy_.default or writer.args[0] is not node:
            return False
        (source,) = _nodes_in([writer.args[1]])
        return self._values_of(source) is node

    def _values_of(self, node: fx.Node) -> fx.Node:
        """Return the node whose values this one repeats: through copies, and a choice between two that are equal."""
        while node.target in _REPEATS and not self._writers_of_made(node):
            node = node.all_input_nodes[0]
        if node.target is _aten.where.self and not self._writers_of_made(node):
            if_true, if_false = [self._values_of(choice) for choice in _nodes_in(list(node.args[1:]))]
            return if_true if if_true is if_false else node
        return node

    def _writers_of_made(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that write to the memory of a node, if the graph makes it."""
        root = self.root[node]
        return self.writers.get(root, []) if root.op == "call_function" else []


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an operation writes to."""
    if node.op != "call_function":
        return []
    if node.target in _BATCH_NORMS:
        is_training = len(node.args) > 5 and node.args[5]
        running_statistics = node.args[3:5] if is_training else ()
        return _nodes_in(list(running_statistics))
    if str(node.target) == "triton_kernel_wrapper_mutation":
        return node.all_input_nodes
    return _nodes_in(aliased(node.target, node.args, node.kwargs, written=True))


def _nodes_in(tree: list[object]) -> list[fx.Node]:
    """Return the nodes among arguments, also those inside lists."""
    return [leaf for leaf in _tree.leaves(tree) if isinstance(leaf, fx.Node)]
