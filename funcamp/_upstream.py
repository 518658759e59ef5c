"""The torch beneath funcamp: its version, and the defects that are worked around, each with the versions that have it.

`tests/test_upstream.py` shows each defect on the versions named here and its absence on the others, on every version
that the tests run on: when a test fails, the range is wrong; when the oldest supported version no longer has a defect,
the workaround can go.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

#: Major and minor: (2, 13) for 2.13.0, 2.13.0+cpu and 2.13.0a0+git1234. Strings do not compare: "2.9" > "2.13".
VERSION: tuple[int, int] = (0, 0)
if _numbers := re.match(r"(\d+)\.(\d+)", str(torch.__version__)):
    VERSION = (int(_numbers[1]), int(_numbers[2]))


class Defect(NamedTuple):
    """A defect of torch, and the versions that have it."""

    first: tuple[int, int]
    """The first version with it, or the oldest supported one."""
    fixed: tuple[int, int] | None
    """The first version without it; None where 2.15 still has it."""

    @property
    def present(self) -> bool:
        """Whether the torch at hand has it."""
        return self.first <= VERSION and (self.fixed is None or self.fixed > VERSION)


#: `NamedTuple._replace` under torch.compile gives an empty tuple: `_state.replace`.
#: https://github.com/pytorch/pytorch/issues/158772
EMPTY_REPLACE = Defect((2, 11), (2, 12))
#: Dynamo does not trace `requires_grad_` of a tensor that it made: `_grad.put_leaves_in_graphs`.
NO_LEAVES = Defect((2, 11), (2, 12))
#: Inductor loses the order of a write after a read when it fuses loops of different ranges: `_mended.keep_order`.
#: https://github.com/pytorch/pytorch/issues/177631
LOST_ORDER = Defect((2, 11), (2, 12))
#: Inductor reads a rounded value back unrounded, whatever emulate_precision_casts is: `_mended.forget`.
#: https://github.com/pytorch/pytorch/issues/185337
UNROUNDED = Defect((2, 11), (2, 13))
#: Inductor loses the offset of a view inside `as_strided`: `_tree.settled` takes no view.
LOST_OFFSET = Defect((2, 11), (2, 13))
#: vmap has no rule for `view(dtype)`: `_counts._Bits`.
NO_RULE_FOR_BITS = Defect((2, 11), (2, 13))
#: Inductor draws for dropout and torch.rand in another order: no workaround; `jit(exact=True)` says so.
SWAPPED_DRAWS = Defect((2, 11), (2, 12))
#: Inductor writes inputs back in their order, though one is the new value of another: `_writeback`.
#: https://github.com/pytorch/pytorch/issues/198131
WRITE_BACK_ORDER = Defect((2, 11), (2, 15))
#: Inductor does not know that a view of a complex input's parts reads that input: `_writeback._read_early`.
COMPLEX_PARTS = Defect((2, 11), None)
#: Dynamo differentiates the forward of an autograd.Function under torch.func.grad, not its backward: `_whole`.
LOST_BACKWARD = Defect((2, 11), (2, 15))
#: The same between two levels of grad: `_whole`.
LOST_NESTED_BACKWARD = Defect((2, 11), None)
#: Dynamo refuses an autograd.Function under vmap of torch.func.grad: `_whole`.
REFUSED_UNDER_VMAP = Defect((2, 11), None)
#: Dynamo's one None keeps the source of the first `.grad` that is None: GradScaler says to return a value.
SOURCE_ON_NONE = Defect((2, 13), (2, 15))
#: torch.compile recomputes one checkpointed region of a graph: no workaround; `track_scales` says so.
ONE_RECOMPUTED_REGION = Defect((2, 12), None)
