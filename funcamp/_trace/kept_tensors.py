"""Give values to tensors of a trace that Python keeps, for example in a module's cache.

A trace runs the step's Python on tensors without values. A mask or a table of positions that a module creates at its
first call and keeps is then such a tensor. The part of the graph that created it is computed, and the result replaces
it.
"""

from __future__ import annotations

import gc
import logging
import types
from collections.abc import Set
from typing import TYPE_CHECKING, Any

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


def settle(
    kept: list[tuple[Tensor, fx.Node]],
    root: Any,
    values: dict[fx.Node, Any],
    *,
    failed: bool,
    constant: Set[fx.Node] = frozenset(),
) -> list[Tensor]:
    """Give tensors of a trace the values that they have after the step; return those that a later call may change.

    Args:
        kept: the tensors that still exist, and their nodes.
        root: has the graph's constants.
        values: values of placeholders, and of constants that are not in root.
        failed: whether the trace failed. Its frames then still exist, so only tensors that depend on no argument count.
        constant: placeholders that have the same values at every call.

    Raises:
        RuntimeError: a tensor is referenced from a place in which it cannot be replaced.
    """
    graph = kept[0][1].graph
    inputs = Memory(value for node, value in values.items() if node.op == "placeholder")
    aliases = Aliases(graph)
    changing = {node for node in values if node.op == "placeholder"} - constant
    following: set[int] = set()
    pairs: list[tuple[Tensor, Tensor]] = []
    redrawn: list[str] = []
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        for tensor, node in kept:
            needed = aliases.behind(node)
            if any(_is_given(other, root) for other in needed):
                if failed:
                    continue
                if aliases.follows(node, changing):
                    following.add(id(tensor))
            elif any(torch.Tag.nondeterministic_seeded in getattr(other.target, "tags", ()) for other in needed):
                redrawn.append(_tree.describe(tensor))
            for other in graph.nodes:
                if other in needed and other not in values:
                    values[other] = _value(other, root, values, aliases)
            value = values[node]
            strided = value.layout == torch.strided
            shared = strided and inputs.meets(value)
            pairs.append((tensor, _like(tensor, value.clone() if shared else value)))
    kept.clear()
    tensor = value = None  # type: ignore[assignment]
    placed, held = _put(pairs)
    if redrawn and not failed:
        log_kept("are random, and a program draws them anew at every call: make them before the first call", redrawn)
    if held is not None and not failed:
        raise RuntimeError(
            f"jit: step must not keep {_tree.describe(held)} in Python where no other can take its place (a tuple, an "
            "object of C): make it before the first call, or return it in the metrics"
        )
    return [now for before, now in placed if before in following]


def _is_given(node: fx.Node, root: Any) -> bool:
    """Return whether a value comes from outside of the graph: from an argument, or from the graph around it."""
    return node.op == "placeholder" or (
        node.op == "get_attr" and isinstance(getattr(root, str(node.target), None), FakeTensor)
    )


def log_kept(what: str, described: list[str]) -> None:
    """Log that Python keeps tensors of the step, and what becomes of them."""
    names = ", ".join(described[:4]) + ", ..." * (len(described) > 4)
    _log.warning("jit: Python keeps tensors of the step that %s: %s", what, names)


def _value(node: fx.Node, root: Any, values: dict[fx.Node, Any], aliases: Aliases) -> Any:
    if node.op == "get_attr":
        return getattr(root, str(node.target))
    target: Any = node.target
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    held = [other for other in written_arguments(node) if aliases.root[other].op != "call_function"]
    if held:  # clone, so that no tensor of a user is written
        own = {other: values[other].clone() for other in held}
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda other: own.get(other, values[other]))
    return target(*args, **kwargs)


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(value, tensor.requires_grad)
    return value.detach().requires_grad_(tensor.requires_grad and tensor.is_leaf)


def _put(pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[tuple[int, Tensor]], Tensor | None]:
    """Swap the first of each pair for the second.

    Returns:
        For each first tensor its id, and the tensor that is now in its place; a tensor that could not be replaced.
    """
    count = -1
    placed: list[tuple[int, Tensor]] = []
    while pairs and len(pairs) != count:  # views first; afterwards nothing refers to their bases
        count, left = len(pairs), []
        while pairs:
            try:
                torch.utils.swap_tensors(*pairs[-1])  # type: ignore[no-untyped-call]
                placed.append((id(pairs[-1][0]), pairs[-1][0]))
            except RuntimeError:
                left.append(pairs[-1])
            pairs.pop()
        pairs = left
    if not pairs:
        return placed, None
    # torch 2.15 refers weakly to tensors of a scan's body, which cannot be swapped: their holders get the values.
    places = {id(tensor): value for tensor, value in pairs}
    placed += places.items()
    for holder in gc.get_referrers(*[tensor for tensor, _ in pairs]):
        if isinstance(holder, dict):
            for key in [key for key, value in holder.items() if id(value) in places]:
                holder[key] = places[id(holder[key])]
        elif isinstance(holder, list):
            for index, value in enumerate(holder):
                if id(value) in places:
                    holder[index] = places[id(value)]
        elif isinstance(holder, types.CellType):
            holder.cell_contents = places[id(holder.cell_contents)]
    tensors = [tensor for tensor, _ in pairs]
    ours = {id(tensors), *map(id, pairs)}
    pairs.clear()
    return placed, next(
        (
            tensor
            for tensor in tensors
            if any(
                id(holder) not in ours and not isinstance(holder, types.FrameType)
                for holder in gc.get_referrers(tensor)
            )
        ),
        None,
    )
