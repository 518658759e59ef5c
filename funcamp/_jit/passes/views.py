"""Let a view copy where a program has another order in memory than the trace, in which the view is possible.

Kernels, and what Inductor takes instead of them, lay some results out otherwise than a trace without values expects:
`cat` of a tensor and an empty one, a batch norm of a transposed tensor (pytorch#192668, open).
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

from funcamp._jit.passes.emit import emit
from funcamp._jit.passes.program import Pass, Program
from funcamp._trace.aliases import Aliases
from funcamp._upstream.chains import is_view

_aten = torch.ops.aten
#: Views that are impossible in some orders; `reshape` copies there.
_SHAPES = {_aten.view.default, _aten._unsafe_view.default}
#: Views of numbers that are beside each other.
_OF_NEIGHBOURS = {_aten.view.dtype, _aten.view_as_complex.default}
#: Views of memory, whatever it shows: offsets count from its begin.
_OF_MEMORY = {_aten.as_strided.default, _aten._reshape_alias.default}
_VIEWS = _SHAPES | _OF_NEIGHBOURS | _OF_MEMORY


def let_views_copy(graph: fx.Graph) -> None:
    """Replace views by operations that copy if they must. What is written through a view has the trace's order."""
    aliases = Aliases(graph)
    views = [node for node in graph.nodes if node.target in _VIEWS]
    base_of = {node: _base_of(node, aliases) for node in views}
    # The compiler takes no write through a view of memory that is a view of another view.
    strided = {base_of[node] for node in views if node.target in _OF_MEMORY}
    written: dict[fx.Node, None] = {}
    for node in views:
        root = aliases.root[node]
        if root in aliases.writers:
            if root.op == "call_function" and base_of[node] not in strided:
                written[base_of[node]] = None
        elif node.target in _SHAPES:
            node.target = _aten.reshape.default
        elif node.target in _OF_NEIGHBOURS:
            with graph.inserting_before(node):
                node.replace_input_with(node.args[0], _laid_out(node.args[0]))
        else:
            _view_whole_memory(node, base_of[node])
    for base in written:
        users = list(base.users)
        with graph.inserting_before(base.next):
            laid_out = _laid_out(base)
        for user in users:
            user.replace_input_with(base, laid_out)


def _base_of(node: fx.Node, aliases: Aliases) -> Any:
    """Return the tensor of which a node is a view: its root, or one of the root's results."""
    root = aliases.root[node]
    base = node
    while base is not root and not (base.target is operator.getitem and base.args[0] is root):
        base = next(source for source in base.all_input_nodes if aliases.root[source] is root)
    return base


def _view_whole_memory(node: fx.Node, base: Any) -> None:
    """Let a view of memory read the tensor that was made there, and not a view of it, in the order of the trace."""
    read: Any = node.args[0]
    _, size, stride, *offset = node.args
    begin = offset[0] if offset and offset[0] is not None else read.meta["val"].storage_offset()
    with node.graph.inserting_before(node):
        laid_out = _laid_out(base)
    node.target = _aten.as_strided.default
    node.args = (laid_out, size, stride, begin - base.meta["val"].storage_offset())


def _laid_out(read: Any) -> Any:
    """Return a copy of a node's value in the order of the trace; the node itself if that has gaps, or one number."""
    graph = read.graph
    value: Tensor = read.meta["val"]
    # What is expanded has a stride of 0, and is not the innermost.
    order = sorted(range(value.dim()), key=lambda dim: value.stride(dim) or math.inf, reverse=True)
    back = sorted(range(value.dim()), key=order.__getitem__)
    if value.dim() == 0 or not (is_view(read) or value.permute(order).is_contiguous()):
        return read
    permuted = emit(graph, _aten.permute.default, (read, order), {})
    copied = emit(graph, _aten.clone.default, (permuted,), {"memory_format": torch.contiguous_format})
    return emit(graph, _aten.permute.default, (copied, back), {})


def _run(program: Program) -> Program:
    with program.mode:
        let_views_copy(program.module.graph)
    return program


PASS = Pass(
    name="views",
    why="some results have another order in memory than the trace, in which a traced view may be impossible",
    evidence="https://github.com/pytorch/pytorch/issues/192668; tests/jit/test_eager_layouts.py",
    where=lambda _: True,
    run=_run,
    defect=True,
)
