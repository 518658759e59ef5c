"""The operations that a compiler gets instead of others: Inductor's own table, with entries of this library."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcamp import _upstream
from funcamp._jit.convolutions import convolutions
from funcamp._jit.float16_sums import float16_sums

Decompositions: TypeAlias = dict[Any, Callable[..., Any]]


class Table(Decompositions):
    """A table that is pickled by name: Inductor caches no program whose table it cannot pickle.

    Args:
        call: a function that has a name in its module and returns this table, and its arguments.
        table: the table.
    """

    def __init__(self, call: tuple[Any, ...], table: Decompositions) -> None:
        super().__init__(table)
        self._call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (self._call,)


def _remade(call: tuple[Any, ...]) -> Table:
    function, *given = call
    table: Table = function(*given)
    return table


@functools.cache
def decompositions(exact: bool) -> Table:
    """Return the table.

    Args:
        exact: leave out the operations that would draw other random numbers than in eager mode, or sum in another
            precision.
    """
    from torch._inductor import config

    with config.patch(fallback_random=exact):
        table: Decompositions = _upstream.find("torch._inductor.decomposition.select_decomp_table")()
    # ZERO_TENSORS: zeros without memory, as torch.func.jvp and the derivative of torch.sgn have them.
    own = {torch.ops.aten._efficientzerotensor.default: _zeros, **convolutions(table)}
    if exact:
        own |= float16_sums({**table, **own})
    return Table((decompositions, exact), {**table, **own})


def _zeros(size: list[int], **options: Any) -> Tensor:
    return torch.zeros(size, **options)
