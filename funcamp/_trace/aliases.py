"""Which nodes of a traced graph share memory, and which nodes write it, by the operations' schemas."""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import fx

from funcamp import _tree
from funcamp._trace.schema import aliased, reads_no_value
from funcamp._upstream.chains import behind

_aten = torch.ops.aten
#: A training one writes its running mean and variance, of which torch's schema says nothing.
_BATCH_NORMS = {_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default, _aten.miopen_batch_norm.default}
#: Operations whose result has the values of their first argument.
_REPEATS = {_aten.clone.default, _aten.detach.default, _aten.alias.default}


class Aliases:
    """The memory that each node of a graph refers to, and the nodes that write to it."""

    def __init__(self, graph: fx.Graph) -> None:
        #: For every node the node that made its memory: itself, or that of which it is a view.
        self.root: dict[fx.Node, fx.Node] = {}
        #: The nodes that write to the memory of a node.
        self.writers: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            self.root[node] = self._find(node)
            for written in written_arguments(node):
                self.writers.setdefault(self.root[written], []).append(node)

    def _find(self, node: fx.Node) -> fx.Node:
        if node.target is operator.getitem:
            return self.root[node.all_input_nodes[0]]
        schema = getattr(node.target, "_schema", None)
        if schema is None or not any(result.alias_info for result in schema.returns):
            return node
        sources = _nodes(aliased(node.target, node.args, node.kwargs))
        return self.root[sources[0]] if sources else node

    def behind(self, *nodes: fx.Node) -> set[fx.Node]:
        """Return nodes, everything that they are computed from, and everything that writes to any of these.

        Inputs count with the values that they have before the graph runs.
        """
        return behind([*nodes], lambda now: [*now.all_input_nodes, *self._writers_before(now)])

    def follows(self, node: fx.Node, inputs: Set[fx.Node]) -> bool:
        """Return whether the values of a node depend on those of one of these inputs."""

        def before(now: fx.Node) -> list[fx.Node]:
            sources = [] if _reads_no_value(now) else now.all_input_nodes
            return [*sources, *self._writers_before(now)]

        return bool(inputs & behind([node], before))

    def changed(self, given: Sequence[fx.Node], results: Sequence[fx.Node]) -> set[fx.Node]:
        """Return the inputs that the graph writes other values to, or returns with other values.

        Args:
            given: the inputs.
            results: what the graph returns for the first of them.
        """
        found = {one for one, other in zip(given, results) if self._repeated(other) is not one}
        for one in given:
            for writer in self.writers.get(one, ()):
                is_copy = writer.target is _aten.copy_.default and writer.args[0] is one
                if not is_copy or self._repeated(_nodes([writer.args[1]])[0]) is not one:
                    found.add(one)
        return found

    def _repeated(self, node: fx.Node) -> fx.Node:
        """Return the node whose values this one repeats: through copies, and a choice between two that are equal."""
        while node.target in _REPEATS and not (self.root[node].op == "call_function" and self._written(node)):
            node = node.all_input_nodes[0]
        if node.target is _aten.where.self and not self._written(node):
            one, other = map(self._repeated, _nodes(list(node.args[1:])))
            return one if one is other else node
        return node

    def _written(self, node: fx.Node) -> bool:
        return bool(self.writers.get(self.root[node]))

    def _writers_before(self, now: fx.Node) -> list[fx.Node]:
        memory = self.root[now]
        return self.writers.get(memory, []) if memory.op == "call_function" else []


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that an operation writes to."""
    if node.op != "call_function":
        return []
    if node.target in _BATCH_NORMS:
        statistics = node.args[3:5] if len(node.args) > 5 and node.args[5] else ()
        return _nodes(list(statistics))
    if getattr(node.target, "_schema", None) is None:
        return node.all_input_nodes if _may_write(node) else []
    return _nodes(aliased(node.target, node.args, node.kwargs, written=True))


def _reads_no_value(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and reads_no_value(schema.name)


def _may_write(node: fx.Node) -> bool:
    """Return whether an operation that takes graphs or kernels may write to any of its tensors."""
    if str(node.target) == "triton_kernel_wrapper_mutation":
        return True
    root = node.graph.owning_module
    for other in node.all_input_nodes:
        body = getattr(root, str(other.target), None) if other.op == "get_attr" else None
        if isinstance(body, fx.GraphModule):
            written = Aliases(body.graph).writers
            if any(memory.op == "placeholder" for memory in written):
                return True
    return False


def _nodes(leaves: list[Any]) -> list[fx.Node]:
    return [leaf for leaf in _tree.leaves(leaves) if isinstance(leaf, fx.Node)]
