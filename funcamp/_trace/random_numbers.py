"""Random numbers in a trace: none is drawn, and a generator that is set back repeats its numbers.

During a trace, the seed of torch's default generator is used as the position in its sequence. `torch.utils.checkpoint`
sets the generator back to the position of the forward pass and draws again: it gets the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from funcamp import _tree
from funcamp._trace.schema import aliased
from funcamp._trace.user_line import in_stack
from funcamp._upstream.chains import chain_start

#: Larger than any user's seed.
_FIRST = 1 << 63
_aten = torch.ops.aten
_RANGE = getattr(_aten.random_, "from")
_SAME_VALUES = (_aten.clone.default, _aten.detach.default, _aten.alias.default)


class Draws:
    """The random draws of a trace.

    Args:
        node_of: returns the graph node of a tensor of the trace.
    """

    def __init__(self, node_of: Callable[[Tensor], fx.Node | None]) -> None:
        self._node_of = node_of
        self._drawn: dict[Any, tuple[list[fx.Node | None], Any]] = {}
        self._next = _FIRST

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Context manager: a trace with draws; restores the generator afterwards."""
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(_FIRST)
            try:
                yield
            finally:
                self._drawn.clear()

    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operation that draws random numbers.

        Raises:
            RuntimeError: it uses another generator, a seeded one, or one that was set back and now draws other numbers.
        """
        turn = torch.default_generator.initial_seed()
        leaves = _tree.leaves((args, kwargs))
        if turn < _FIRST or any(isinstance(leaf, torch.Generator) for leaf in leaves):
            raise RuntimeError(
                "jit: step must draw from torch's default generator and not seed it, as the state of a generator "
                f"cannot be part of a program; {in_stack()} does: seed before the call, or pass a seed's numbers in "
                "the batch"
            )
        torch.default_generator.manual_seed(turn + 1)
        written = [leaf for leaf in aliased(func, args, kwargs, written=True) if isinstance(leaf, Tensor)]
        target = written[0] if len(written) == 1 and written[0] is args[0] else None
        shape_only = func._schema.name.endswith("_like")
        read = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not shape_only and leaf is not target]
        behind = [self._node_of(leaf) for leaf in read]
        alike = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        key = turn, func, str(alike)
        if turn < self._next:
            before, drawn = self._drawn.get(key, ([], None))
            if drawn is None or not all(map(_same, before, behind)):
                raise RuntimeError(
                    "jit: step must not set the generator back and then draw other numbers than before, as a program "
                    f"cannot draw at a place in the sequence; {in_stack()} does: draw once and compute both from it"
                )
            return _again(drawn, written, target)
        self._next = turn + 1
        # Store copies, because a draw may be written later (dropout divides it); unused copies are removed.
        if target is None:
            out = func(*args, **kwargs)
            self._drawn[key] = behind, (_copies(out), _copies(written))
            return out
        # Eager mode fills memory in its order; functionalized, the call would fill a contiguous tensor.
        memory = _in_order(target)
        if func is _RANGE and len(args) == 3 and args[2] is not None:
            # An argument named like a keyword (`from`) cannot be passed by name in a graph.
            memory.copy_(_aten.randint.low(*args[1:], memory.shape, dtype=memory.dtype, device=memory.device))
        else:
            func(memory, *args[1:], **kwargs)
        self._drawn[key] = behind, (None, [memory.clone()])
        return target


def _again(drawn: Any, written: list[Tensor], target: Tensor | None) -> Any:
    out, values = drawn
    if out is None and target is not None:
        _in_order(target).copy_(values[0])
        return target
    for place, value in zip(written, values):
        place.copy_(value)
    return _copies(out)


def _in_order(target: Tensor) -> Tensor:
    if target.is_contiguous():  # true also of a size that follows from values, with which no stride can be compared
        return target
    return target.permute(sorted(range(target.dim()), key=target.stride, reverse=True))


def _copies(out: Any) -> Any:
    leaves, spec = _tree.flatten(out)
    return _tree.unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def _same(one: fx.Node | None, other: fx.Node | None) -> bool:
    """Return whether two nodes have equal values because their computations are equal."""
    rest, seen = [(one, other)], set()
    while rest:
        a, b = pair = tuple(chain_start(node, lambda one: one.target in _SAME_VALUES) for node in rest.pop())
        if a is b or pair in seen:
            continue
        seen.add(pair)
        if a is None or b is None or a.op != "call_function" or (a.op, a.target) != (b.op, b.target):
            return False
        (left, spec), (right, like) = (_tree.flatten((node.args, dict(node.kwargs))) for node in (a, b))
        if spec != like:
            return False
        for x, y in zip(left, right):
            if isinstance(x, fx.Node) and isinstance(y, fx.Node):
                rest.append((x, y))
            elif isinstance(x, fx.Node) or isinstance(y, fx.Node) or x != y:
                return False
    return True
