"""Check, norm and unscale in two readings of the gradients, the second inside the optimizer.

    x         = f32(g) * inv_scale                      the unscaled gradients, never written to memory
    squares   = sum x^2                                 one pass
    check     = sum max(|x| * 2^-90, 2^-60)^2           the same pass
    found_inf = 1 if check is not finite
    norm      = sqrt(squares), or 2^90 * sqrt(check) in float64 if squares overflows float32

The square of a finite float32 times 2^-180 is below 2^76, so check is finite if and only if every unscaled gradient is.
If squares overflows, the elements that matter to it are far above the floor. The floor is there because products that
underflow double the time of the pass on a CPU. A norm beyond float32 still clips to max_norm here;
torch.nn.utils.clip_grad_norm_ takes it as infinite and multiplies every gradient by 0. Two float32 sums run at memory
speed; a float64 sum does not, on a CPU or on a GPU with few float64 units.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._dtensor import any_in_meshes, group_by_mesh_dims, local, total
from funcamp._optim.arithmetic import computed_once
from funcamp._scaler.scale import unscaled_leaf
from funcamp._scaler.state import ScalerState, reciprocal, replace, widen
from funcamp._trace.tracing import compiling
from funcamp._types import Tree


class _Range(NamedTuple):
    """The constants of the check for gradients of one dtype; see the docstring of the module."""

    shrink: float
    """A factor that keeps squares finite."""
    floor: float
    undo: float
    """What undoes the factor in a sum of squares, in float64; infinite if float64 has no such number."""


# A norm whose square is beyond float64 is infinite.
_RANGES = {
    torch.float32: _Range(shrink=2.0**-90, floor=2.0**-60, undo=2.0**180),
    torch.float64: _Range(shrink=2.0**-760, floor=2.0**-500, undo=math.inf),
}

#: Row length of sums on a CPU: for longer sums Inductor uses a cascade at a third of the speed.
_ROW = 2048
#: Rows of one part on a CPU in an eager step, in which each operation reads and writes memory: half a megabyte, so that
#: a part and what is computed from it stay in the cache. Compiled, all operations on a gradient are one loop.
_ROWS_IN_CACHE = 64


def flag_and_norm(state: ScalerState, grads: Tree) -> tuple[ScalerState, Tensor]:
    """Return the state with the flag of scaled gradients, and their unscaled norm in float64, from one reading."""
    inv_scale = computed_once(reciprocal(state.scale))
    leaves = [leaf for leaf in _tree.leaves(grads) if leaf is not None]
    total_squares = torch.zeros_like(widen(state.scale))
    finite = torch.ones_like(state.scale, dtype=torch.bool)
    for across, members in group_by_mesh_dims(leaves):
        sums: dict[torch.dtype, list[Tensor]] = {}
        for leaf in members:
            for part in _parts(local(leaf)):  # of DTensors this rank's
                value = unscaled_leaf(part, inv_scale)
                if value.is_complex():
                    value = torch.view_as_real(value)
                sums.setdefault(value.dtype, []).extend(_square_and_check(value))
        for dtype, sums_of_dtype in sums.items():
            # Stacked, because Inductor does not fuse sums that are further apart and would read the values twice.
            squares, checks = torch.stack(sums_of_dtype).view(-1, 2).unbind(1)
            without_overflow = torch.where(torch.isfinite(squares), squares, checks * _RANGES[dtype].undo)
            total_squares = total_squares + total(without_overflow.sum(), across)
            finite = finite & torch.isfinite(checks).all()
    is_found = (state.found_inf != 0) | any_in_meshes(~finite, leaves)
    return replace(state, found_inf=is_found.float()), total_squares.sqrt()


def _square_and_check(value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of a value's squares, and the check; see the docstring of the module."""
    constants = _RANGES[value.dtype]
    shrunk = (value * constants.shrink).abs()
    return _sum(value.square()), _sum(shrunk.clamp(min=constants.floor).square())


def _parts(leaf: Tensor) -> list[Tensor]:
    """Split a large gradient on a CPU into rows, a few at once, and a rest; return any other as it is."""
    is_plain = leaf.device.type == "cpu" and leaf.layout == torch.strided and not leaf.is_complex()
    if not is_plain or leaf.numel() < 2 * _ROW or not leaf.is_contiguous():
        return [leaf]
    flat = leaf.reshape(-1)
    size_of_rows = leaf.numel() // _ROW * _ROW
    rows = flat[:size_of_rows].view(-1, _ROW)
    parts = [rows] if compiling() else list(torch.split(rows, _ROWS_IN_CACHE))
    if size_of_rows < leaf.numel():
        parts.append(flat[size_of_rows:])
    return parts


def _sum(squares: Tensor) -> Tensor:
    """Sum in float32 along rows and in float64 over them; in float64 for float64."""
    if squares.dim() == 2 and squares.shape[1] == _ROW:
        return widen(squares.sum(1)).sum()
    return widen(squares.sum())


def unscaled_gradients(state: ScalerState, grads: Tree) -> Tree:
    """Return unscaled gradients; compiled, they are computed in the optimizer's loop."""
    inv_scale = computed_once(reciprocal(state.scale))
    return _tree.map_leaves(lambda leaf: unscaled_leaf(leaf, inv_scale), *_tree.flatten(grads))
