"""What the compiler takes instead of some operations: Inductor's own table, with entries that passes add."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from funcamp import _upstream

if TYPE_CHECKING:
    from torch._ops import OpOverload

_get_decompositions = _upstream.find("torch._decomp.get_decompositions", lambda _: {})
#: Functions by the operation that they are taken for.
Decompositions: TypeAlias = dict["OpOverload[..., Any]", Callable[..., Any]]
#: Returns entries to add, given the table before.
Extension: TypeAlias = Callable[[Decompositions], Decompositions]


class Table(Decompositions):
    """A table of decompositions, which is pickled as the names of the functions that made it.

    Inductor caches no program whose table it cannot pickle, and the entries themselves cannot be pickled.

    Args:
        extensions: functions of modules, in the order in which they add their entries.
        draws_as_eager: leave out the operations that would draw other random numbers than in eager mode.
    """

    def __init__(self, extensions: tuple[Extension, ...], draws_as_eager: bool) -> None:
        from torch._inductor import config

        with config.patch(fallback_random=draws_as_eager):
            super().__init__(_upstream.find("torch._inductor.decomposition.select_decomp_table")())
        # torch.compile decomposes it before Inductor, which refuses it if the environment has CI=true.
        self.update(_get_decompositions([torch.ops.aten.upsample_trilinear3d.default]))
        for extension in extensions:
            self.update(extension(self))
        self._extensions = extensions
        self._draws_as_eager = draws_as_eager

    def __reduce__(self) -> tuple[object, ...]:
        return Table, (self._extensions, self._draws_as_eager)
