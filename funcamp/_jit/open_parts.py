"""Compile a program in which some shapes or strides follow from values, such as those of `logits[mask]`: open layouts.

Some releases of Inductor compute such operations wrongly without an error (`_upstream.WRONG_ROWS`). So it compiles only
the parts between them, and they run one by one, as in eager mode:

    stage -2: compiled part, then open operations | stage -1: compiled part, ... | stage 0: compiled part, all writes

An operation is open if an argument or a result has an open layout. What a trace assumes of such sizes (that two are the
same, or that one is not 1) is checked: the result of every open operation must have the shape of the trace.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from funcamp import _tree
from funcamp._jit.decompositions import Table, decompositions
from funcamp._jit.eager_layouts import laid_out_as
from funcamp._trace.open_shapes import has_open_layout, is_open_node
from funcamp._trace.schema import aliased
from funcamp._upstream.inductor_writeback import behind

_aten = torch.ops.aten


@functools.cache
def closed_decompositions(exact: bool) -> Table:
    """Return the table for operations that are not open; those that run one by one stay whole."""

    def closed(decomposed: Callable[..., Any]) -> Callable[..., Any]:
        def decompose(*args: Any, **kwargs: Any) -> Any:
            if any(map(has_open_layout, _tree.leaves((args, kwargs)))):
                return NotImplemented
            return decomposed(*args, **kwargs)

        return decompose

    table = {target: closed(how) for target, how in decompositions(exact).items()}
    return Table((closed_decompositions, exact), table)


def inner_compile(module: fx.GraphModule, _: Sequence[Any], **options: Any) -> Callable[[list[Any]], list[Any]]:
    """Compile the parts of a functional graph; an argument of Inductor's `compile_fx`.

    Args:
        module: a graph without writes, except copies to inputs at its end.
        options: for Inductor's own inner_compile.
    """
    from torch._guards import TracingContext
    from torch._inductor.compile_fx import compile_fx_inner

    options["static_input_idxs"] = ()
    graph = module.graph
    stages = _Stages(graph)
    inputs, results = graph.find_nodes(op="placeholder"), list(graph.output_node().args[0])  # type: ignore[arg-type]
    views = [node for node in results if node in stages.free]
    groups = stages.groups()
    end = 0, False
    if views:
        groups[end] = [*groups.get(end, ()), *views]
    pieces = {place: stages.with_free(nodes) for place, nodes in sorted(groups.items())}
    needed = {place: _outside(nodes) for place, nodes in pieces.items()}
    crossing = {*results, *(node for outside in needed.values() for node in outside)} - stages.free
    ready = []
    for place, nodes in pieces.items():
        given, (_stage, runs_open) = needed[place], place
        made = [node for node in nodes if node in crossing] + (views if place == end else [])
        part = _module(module, nodes, given, made, checked=runs_open)
        run: Callable[..., Any] = part
        if not runs_open:
            with TracingContext.patch(output_strides=None):  # those of the whole program are asked for, not of a part
                run = compile_fx_inner(part, [node.meta["val"] for node in given], **options)
        ready.append(_Piece(run, given, made, not runs_open))
    return _in_turn(ready, inputs, results)


class _Piece(NamedTuple):
    """Operations that run together."""

    run: Callable[..., Any]
    given: list[fx.Node]
    """What they need."""
    made: list[fx.Node]
    """What others need of them."""
    compiled: bool


class _Stages:
    """When each node of a graph runs: as late as those that need it allow. Stages count up to 0, the last."""

    def __init__(self, graph: fx.Graph) -> None:
        nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        self._open: set[fx.Node] = set()
        #: Views, and what is neither computed nor stored: made anew wherever they are needed, because Inductor takes
        #: for granted that no input of a part shares memory with one that it writes.
        self.free: set[fx.Node] = set()
        for node in nodes:
            of = node.args[0] if node.target is operator.getitem else None
            if of in self._open or (of is None and is_open_node(node)):
                self._open.add(node)
            elif of in self.free or node.op == "get_attr" or getattr(node.target, "is_view", False):
                self.free.add(node)
        after = _after_draws(nodes)
        self._stage: dict[fx.Node, int] = {}
        for node in reversed(nodes):
            later = [*(user for user in node.users if user.op != "output"), *after.get(node, ())]
            latest = -(node in self._open and not aliased(node.target, node.args, node.kwargs, written=True))
            self._stage[node] = min([latest, *(self._stage[user] - self._gap(node, user) for user in later)])
        for node in nodes:
            if node.target is operator.getitem:  # a part returns tensors only
                self._stage[node] = self._stage[node.args[0]]

    def groups(self) -> dict[tuple[int, bool], list[fx.Node]]:
        """Return the nodes that run together, except free ones, by their stage and whether they are open."""
        found: dict[tuple[int, bool], list[fx.Node]] = {}
        for node in reversed(self._stage):  # the order of the graph
            if node not in self.free:
                found.setdefault((self._stage[node], node in self._open), []).append(node)
        return found

    def with_free(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """Return nodes and the free ones that they need, in the order of the graph."""
        return sorted(behind(nodes, lambda node: [other for other in node.all_input_nodes if other in self.free]))

    def _gap(self, node: fx.Node, user: fx.Node) -> bool:
        return node in self._open and user not in self._open


def _after_draws(nodes: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return for each operation that draws random numbers the one after it: they stay in order."""
    draws = [node for node in nodes if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())]
    return {before: [node] for before, node in itertools.pairwise(draws)}


def _outside(nodes: list[fx.Node]) -> list[fx.Node]:
    """Return what nodes need besides each other, in the order of the graph."""
    inside = set(nodes)
    return sorted({other for node in nodes for other in node.all_input_nodes} - inside)


def _module(
    root: fx.GraphModule, nodes: list[fx.Node], given: list[fx.Node], made: list[fx.Node], *, checked: bool
) -> fx.GraphModule:
    """Return a module of these nodes; with `checked`, its first input is a dict for the sizes."""
    graph = fx.Graph()
    sizes = graph.placeholder("sizes") if checked else None
    copies: dict[fx.Node, fx.Node] = {}
    for node in given:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        crossing = node in made
        if sizes is not None and (check := _check(node.meta.get("val"), crossing=crossing)) is not None:
            if crossing and getattr(node.target, "is_view", False):
                copies[node] = graph.call_function(_aten.clone.default, (copies[node],))
            copies[node] = graph.call_function(check, (sizes, copies[node]))
    output = graph.output(tuple(copies[node] for node in made))
    output.meta["user_visible_output_idxs"] = list(range(len(made)))
    return fx.GraphModule(root, graph)


def _check(expected: object, *, crossing: bool) -> Callable[[dict[Any, Any], Any], Any] | None:
    """Return a function that compares an open operation's result with the trace.

    Args:
        expected: the result in the trace.
        crossing: whether other pieces need it; if its layout is known, they get it in the layout of the trace.
    """
    if isinstance(expected, torch.SymInt):
        number = _expression(expected)

        def check_number(sizes: dict[Any, Any], value: int) -> int:
            _compare(sizes, [number], [value])
            return value

        return check_number if number.is_Symbol else None
    if not isinstance(expected, Tensor):
        return None
    like, shape = expected, [_expression(size) for size in expected.shape]
    name = str(shape)
    laid_out = crossing and not any(isinstance(size, torch.SymInt) for size in (*like.shape, *like.stride()))

    def check(sizes: dict[Any, Any], value: Tensor) -> Tensor:
        found = value.shape
        if found != sizes.get(name):
            _compare(sizes, shape, found)
            sizes[name] = found
        if crossing and value.dtype != like.dtype:
            raise RuntimeError(f"jit: a tensor must have dtype {like.dtype}, as in the trace; got {value.dtype}")
        return laid_out_as(value, like) if laid_out else value

    return check


def _expression(size: Any) -> Any:
    """Return the formula of a size that follows from values; any other size as it is."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _compare(sizes: dict[Any, Any], shape: Sequence[Any], found: Sequence[int]) -> None:
    """Compare a shape with the trace's, and note sizes that are new.

    Raises:
        RuntimeError: they differ.
    """
    for size, there in zip(shape, found):
        if isinstance(size, int):
            wanted = size
        elif size.is_Symbol:
            wanted = sizes.setdefault(size, there)
        else:
            known = tuple((symbol, sizes[symbol]) for symbol in size.free_symbols if symbol in sizes)
            value = _value(size, known)
            wanted = there if value is None else value
        if wanted != there:
            raise RuntimeError(
                f"jit: a tensor of shape {tuple(found)} must have size {wanted} instead of {there}, because step was "
                "traced for equal sizes where tensors meet: a single selected row is not repeated, as in eager mode"
            )


@functools.lru_cache(maxsize=4096)
def _value(size: Any, known: tuple[tuple[Any, int], ...]) -> int | None:
    """Return the value of a formula; None if it has further symbols."""
    value = size.subs(dict(known))
    return int(value) if value.is_Integer else None


def _in_turn(pieces: list[_Piece], inputs: list[fx.Node], results: list[Any]) -> Callable[[list[Any]], list[Any]]:
    """Return a function that runs pieces one after the other, and drops what no later one needs."""
    kept = {node for node in results if isinstance(node, fx.Node)}
    last_use = {node: index for index, piece in enumerate(pieces) for node in piece.given}
    plan = [
        (piece, [node not in kept and last_use[node] == index for node in piece.given])
        for index, piece in enumerate(pieces)
    ]

    def run(args: list[Any]) -> list[Any]:
        values, sizes = dict(zip(inputs, args)), dict[Any, Any]()
        args.clear()
        for piece, done in plan:
            given = [values.pop(node) if drop else values[node] for node, drop in zip(piece.given, done)]
            out = piece.run(given) if piece.compiled else piece.run(sizes, *given)
            values.update(zip(piece.made, out))
            del given, out  # else alive while the next piece runs
        return [values[value] if isinstance(value, fx.Node) else value for value in results]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
