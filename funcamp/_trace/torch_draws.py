"""What torch draws in a trace: no number is drawn, and a backward pass that sets the generator back gets the same ones.

During a trace, the seed of torch's default generator is used as the position in its sequence. `torch.utils.checkpoint`
sets the generator back to the position of the forward pass, in the backward pass, and computes the same again: it gets
the same numbers. What Python and numpy draw is noticed in `until_stable.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from funcamp import _tree, _upstream
from funcamp._trace.open_shapes import has_open_layout
from funcamp._trace.schema import aliased
from funcamp._trace.tracing import HostError
from funcamp._trace.user_line import line_in_stack
from funcamp._types import Args, Kwargs, Operation, Tree

#: The seed at which a trace starts: larger than any user's seed that is not negative.
_FIRST_POSITION = 1 << 63
#: torch adds 2**64 to a negative seed, so those are above the positions.
_END_OF_POSITIONS = _FIRST_POSITION + (1 << 40)
_aten = torch.ops.aten
#: `tensor.random_(from, to)`.
_RANDOM_FROM = getattr(_aten.random_, "from")
#: Operations that draw a tensor like another one: what draws a tensor of a shape, and what fills one.
_LIKE: dict[Any, tuple[Any, Any]] = {
    _aten.rand_like.default: (_aten.rand.default, _aten.uniform_.default),
    _aten.randn_like.default: (_aten.randn.default, _aten.normal_.default),
    _aten.randint_like.default: (_aten.randint.default, _aten.random_.to),
    _aten.randint_like.low_dtype: (_aten.randint.low, _RANDOM_FROM),
}
_backward_pass = _upstream.find("torch._C._current_graph_task_id", lambda: -1)
#: Operations that draw each number by those of their arguments, in the order of the dimensions.
_BY_ELEMENT = {
    *(_aten.poisson.default, _aten._standard_gamma.default),
    *(_aten.normal.Tensor_Tensor, _aten.normal.Tensor_float, _aten.normal.float_Tensor),
}


class _Drawn(NamedTuple):
    """What an operation has drawn: copies, because a draw may be written later (dropout divides it)."""

    result: object
    """What the operation returned."""
    written: list[Tensor]
    """What it wrote into its arguments."""


#: The position of a draw in the sequence, the operation, and its arguments, with shapes and dtypes of tensors.
_DrawKey: TypeAlias = tuple[int, Operation, str]


class TraceDraws:
    """The random draws of a trace."""

    def __init__(self) -> None:
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
            yield
            if not _is_position(torch.default_generator.initial_seed()):
                raise HostError(
                    "not seed torch's generator (torch.manual_seed), which a program cannot do: seed before the call"
                )

    def draw(self, func: Operation, args: Args, kwargs: Kwargs) -> object:
        """Call an operation that draws random numbers.

        Raises:
            HostError: it uses another generator, a seeded one, or one that was set back, except in a backward pass that
                computes the forward pass again.
        """
        if func in _LIKE and not has_open_layout(args[0]):
            func, args, kwargs = _of_a_layout(func, args, kwargs)
        position = torch.default_generator.initial_seed()
        leaves = _tree.leaves((args, kwargs))
        _refuse_other_numbers(leaves, position)
        torch.default_generator.manual_seed(position + 1)
        key = position, func, str([(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        written = [leaf for leaf in aliased(func, args, kwargs, written=True) if isinstance(leaf, Tensor)]
        if len(written) != 1 or written[0] is not args[0]:
            return self._numbers(key, func, args, kwargs, written)

        # As `tensor.normal_()` does: draw into memory of its own, and copy.
        (filled,) = written
        memory, order = _memory_of(func, filled)
        others = [_permuted(arg, filled, order) for arg in args[1:]]
        self._numbers(key, func, (memory, *others), kwargs, [memory])
        return filled.copy_(memory.permute([order.index(dim) for dim in range(filled.dim())]))

    def _numbers(self, key: _DrawKey, func: Operation, args: Args, kwargs: Kwargs, written: Sequence[Tensor]) -> object:
        """Draw, or repeat what an equal call has drawn before the generator was set back."""
        position, *_ = key
        if position < self._next_position:
            drawn = self._drawn_in_forward_pass(key)
            for tensor, numbers in zip(written, drawn.written):
                tensor.copy_(numbers)
            return _copies(drawn.result)
        self._next_position = position + 1
        result = _call(func, args, kwargs)
        self._drawn[key] = _Drawn(_copies(result), _copies(written))  # removed from the graph if not drawn again
        return result

    def _drawn_in_forward_pass(self, key: _DrawKey) -> _Drawn:
        """Return what an equal call has drawn at this position, to which the backward pass has set the generator back.

        Raises:
            HostError: there was no equal call, or no backward pass runs.
        """
        drawn = self._drawn.get(key)
        if drawn is None or _backward_pass() == -1:
            raise HostError(
                "not set the generator back and then draw, as a program cannot draw at a place in the sequence, except "
                f"in a backward pass that computes the forward pass again; {line_in_stack()} does: draw once and "
                "compute both from it"
            )
        return drawn


def _refuse_other_numbers(leaves: Sequence[object], position: int) -> None:
    """Raise HostError for a draw from another generator, or after the default one was seeded."""
    if any(isinstance(leaf, torch.Generator) for leaf in leaves):
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


def _call(func: Operation, args: Args, kwargs: Kwargs) -> object:
    """Call an operation that draws, as one that can be compiled."""
    if func in _BY_ELEMENT:  # Inductor may give an argument another layout, and raises
        shapes = [arg.shape for arg in args if isinstance(arg, Tensor)]
        shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        flat = [arg.expand(shape).reshape(-1) if isinstance(arg, Tensor) else arg for arg in args]
        return func(*flat, **kwargs).view(shape)
    if func is not _RANDOM_FROM:  # `from` is a keyword of Python, and no name in a graph
        return func(*args, **kwargs)
    memory, *limits = args
    memory.copy_(_aten.randint.low(*limits, memory.shape, dtype=memory.dtype, device=memory.device))
    return memory


def _of_a_layout(func: Operation, args: Args, kwargs: Kwargs) -> tuple[Operation, Args, Kwargs]:
    """Return a draw of a tensor like another one as a draw of the layout that eager mode gives it.

    A compiler may store the other one in another order, which the draw would follow.
    """
    draw, fill = _LIKE[func]
    other, *limits = args
    with disable_proxy_modes_tracing():
        like = torch.empty_like(other, **kwargs)
    if like.is_contiguous():
        return draw, (*limits, list(like.shape)), {"dtype": like.dtype, "device": like.device}
    return fill, (other.new_empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device), *limits), {}


def _memory_of(func: Operation, filled: Tensor) -> tuple[Tensor, list[int]]:
    """Return a new tensor to draw into in place of one that a draw fills, and the order of dimensions that it has.

    Eager mode fills memory in its order. A compiler fills a contiguous tensor so; the order in memory of another one is
    its own choice, except if it is made by `empty_strided`.
    """
    order = list(range(filled.dim()))
    if filled.is_contiguous():  # no stride of a size that follows from values can be compared
        return filled.new_empty(filled.shape), order
    order.sort(key=filled.stride, reverse=True)
    memory = filled.new_empty([filled.shape[dim] for dim in order])
    if func is _aten.normal_.default and filled.numel() * (2 if filled.is_complex() else 1) >= 16:
        # It draws other numbers into contiguous memory: the same memory, with its dimensions the other way round.
        reversed_memory = filled.new_empty_strided(memory.shape[::-1], memory.stride()[::-1])
        if reversed_memory.is_contiguous():  # one dimension: a compiler may draw the other numbers
            return filled.new_empty_strided(filled.shape, filled.stride()), list(range(filled.dim()))
        return reversed_memory, order[::-1]
    return memory, order


def _permuted(arg: object, filled: Tensor, order: list[int]) -> object:
    """Return an argument of a draw as `_memory_of` orders the tensor that is filled."""
    return arg.expand_as(filled).permute(order) if isinstance(arg, Tensor) else arg


def _copies(tree: Tree) -> Any:
    """Return the values of tensors, which may be written later."""
    leaves, spec = _tree.flatten(tree)
    return _tree.unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
