"""What torch draws in a trace: no number is drawn, and a generator that is set back repeats its numbers.

What Python and numpy draw is in `host_draws.py`. During a trace, the seed of torch's default generator is used as the
position in its sequence. `torch.utils.checkpoint` sets the generator back to the position of the forward pass, in the
backward pass, and computes the same again: it gets the same numbers.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx

from funcamp import _tree, _upstream
from funcamp._trace.schema import aliased, reads_no_value
from funcamp._trace.tracing import HostError, NodeOf
from funcamp._trace.user_line import line_in_stack
from funcamp._types import Args, Kwargs, Operation, Tree

#: The seed at which a trace starts: larger than any user's seed that is not negative.
_FIRST_POSITION = 1 << 63
#: torch adds 2**64 to a negative seed, so those are above the positions.
_END_OF_POSITIONS = _FIRST_POSITION + (1 << 40)
_aten = torch.ops.aten
#: `tensor.random_(from, to)`.
_RANDOM_FROM = getattr(_aten.random_, "from")
_backward_pass = _upstream.find("torch._C._current_graph_task_id", lambda: -1)


class _Drawn(NamedTuple):
    """What an operation has drawn: copies, because a draw may be written later (dropout divides it)."""

    sources: list[fx.Node | Tensor]
    """The nodes of the tensors whose values the operation read, such as probabilities; captured tensors themselves."""
    result: object
    """What the operation returned; None if it filled a tensor."""
    written: list[Tensor]
    """What it wrote into its arguments."""


class _Call:
    """A call of an operation that draws.

    Args:
        func: the operation.
        args: its arguments.
        kwargs: its keyword arguments.
    """

    def __init__(self, func: Operation, args: Args, kwargs: Kwargs) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.leaves = _tree.leaves((args, kwargs))
        self.written = [leaf for leaf in aliased(func, args, kwargs, written=True) if isinstance(leaf, Tensor)]
        self.filled: Tensor | None = None
        """The tensor that it fills, if it does nothing else, as `tensor.normal_()` does."""
        if len(self.written) == 1 and self.written[0] is args[0]:
            self.filled = self.written[0]

    def tensors_read(self) -> list[Tensor]:
        """Return the arguments whose values it reads."""
        if reads_no_value(self.func):
            return []
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor) and leaf is not self.filled]

    def description(self) -> str:
        """Return its arguments as a text, with shapes and dtypes of tensors."""
        return str([(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves])


#: The position of a draw in the sequence, the operation, and the description of the call.
_DrawKey: TypeAlias = tuple[int, Operation, str]


class TraceDraws:
    """The random draws of a trace.

    Args:
        node_of: returns the node of a tensor of the trace, or of a graph inside it; None for a captured tensor.
    """

    def __init__(self, node_of: NodeOf) -> None:
        self._node_of = node_of
        self._drawn: dict[_DrawKey, _Drawn] = {}
        self._next_position = _FIRST_POSITION

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Context manager: a trace with draws; restores the generator afterwards.

        Raises:
            HostError: the generator was seeded and nothing was drawn after that.
        """
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(_FIRST_POSITION)
            try:
                yield
            finally:
                self._drawn.clear()
            if not _is_position(torch.default_generator.initial_seed()):
                raise HostError(
                    "not seed torch's generator (torch.manual_seed), which a program cannot do: seed before the call"
                )

    def draw(self, func: Operation, args: Args, kwargs: Kwargs) -> object:
        """Call an operation that draws random numbers.

        Raises:
            HostError: it uses another generator, a seeded one, or one that was set back and now draws other numbers.
        """
        position = torch.default_generator.initial_seed()
        call = _Call(func, args, kwargs)
        _refuse_other_numbers(call, position)
        torch.default_generator.manual_seed(position + 1)
        sources = [self._node_of(tensor) or tensor for tensor in call.tensors_read()]
        key = position, func, call.description()
        was_set_back = position < self._next_position
        if was_set_back:
            return self._draw_again(key, call, sources)
        self._next_position = position + 1
        if call.filled is not None:
            self._drawn[key] = _Drawn(sources, None, [_fill(call, call.filled)])
            return call.filled
        result = func(*args, **kwargs)
        self._drawn[key] = _Drawn(sources, _copy_tensors(result), _copy_tensors(call.written))
        return result

    def _draw_again(self, key: _DrawKey, call: _Call, sources: list[fx.Node | Tensor]) -> object:
        """Return what an equal call has drawn at this position, to which the generator was set back.

        Tensors whose values it reads must be the same ones, except in a backward pass, which computes them again.

        Raises:
            HostError: there was no equal call.
        """
        drawn = self._drawn.get(key)
        is_recomputed = _backward_pass() != -1
        if drawn is None or not (is_recomputed or all(map(operator.is_, drawn.sources, sources))):
            raise HostError(
                "not set the generator back and then draw other numbers than before, as a program "
                f"cannot draw at a place in the sequence; {line_in_stack()} does: draw once and compute both from "
                "it"
            )
        return _repeat(drawn, call)


def _refuse_other_numbers(call: _Call, position: int) -> None:
    """Raise HostError for a draw from another generator, or after the default one was seeded."""
    if any(isinstance(leaf, torch.Generator) for leaf in call.leaves):
        raise HostError(
            "draw from torch's default generator, as the state of another one cannot be part of a program; "
            f"{line_in_stack()} draws from its own: leave out generator=, or pass the numbers in the batch, as "
            "tensors"
        )
    if not _is_position(position):
        raise HostError(
            f"not seed torch's generator, which a program cannot do; {line_in_stack()} draws after it was seeded: "
            "seed before the call, or pass the numbers of that seed in the batch, as tensors"
        )


def _is_position(seed: int) -> bool:
    """Return whether the generator's seed is a position of the trace, and no seed of the step's."""
    return _FIRST_POSITION <= seed < _END_OF_POSITIONS


def _fill(call: _Call, filled: Tensor) -> Tensor:
    """Draw into a tensor; return a copy of the numbers in the order of its memory.

    Eager mode fills memory in its order; functionalized, the call would fill a contiguous tensor.
    """
    memory = _in_memory_order(filled)
    if call.func is _RANDOM_FROM:  # no graph can be written that calls an operation named like a keyword
        memory.copy_(_aten.randint.low(*call.args[1:], memory.shape, dtype=memory.dtype, device=memory.device))
    else:
        call.func(memory, *call.args[1:], **call.kwargs)
    return memory.clone()  # removed from the graph if nothing draws it again


def _repeat(drawn: _Drawn, call: _Call) -> object:
    """Return what an operation has drawn before, at the same position, as if it drew again."""
    if drawn.result is None and call.filled is not None:
        _in_memory_order(call.filled).copy_(drawn.written[0])
        return call.filled
    for tensor, numbers in zip(call.written, drawn.written):
        tensor.copy_(numbers)
    return _copy_tensors(drawn.result)


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Return a view of a tensor whose elements are in the order of its memory."""
    if tensor.is_contiguous():  # true also of a size that follows from values, with which no stride can be compared
        return tensor
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def _copy_tensors(tree: Tree) -> Any:
    leaves, spec = _tree.flatten(tree)
    return _tree.unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
