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

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._dtensor import any_rank, groups, local, total
from funcamp._scaler.precision import reciprocal, widen
from funcamp._scaler.scale import reduced, unscaled
from funcamp._scaler.state import ScalerState, replace
from funcamp._types import Reduce, Tree

# Per dtype: a factor that keeps squares finite, the floor, and the factor's inverse in float64. A norm whose square is
# beyond float64 is infinite.
_RANGES = ((torch.float32, 2.0**-90, 2.0**-60, 2.0**180), (torch.float64, 2.0**-760, 2.0**-500, math.inf))

#: Row length of sums on a CPU: for longer sums Inductor uses a cascade at a third of the speed.
_ROW = 2048


def squares_and_finite(state: ScalerState, grads: Tree) -> tuple[Tensor, Tensor]:
    """Return the sum of squares of the unscaled gradients, and whether all are finite, from one reading."""
    inv_scale = _tree.settled(reciprocal(state.scale))
    leaves = [leaf for leaf in _tree.leaves(grads) if leaf is not None]
    squares, finite = torch.zeros_like(widen(state.scale)), torch.ones_like(state.scale, dtype=torch.bool)
    for over, members in groups(leaves):
        values = [unscaled(part, inv_scale) for leaf in members for part in _parts(local(leaf))]
        values = [torch.view_as_real(value) if value.is_complex() else value for value in values]
        for dtype, small, floor, large in _RANGES:
            chosen = [value for value in values if value.dtype == dtype]
            if chosen:
                # Stacked, because Inductor does not fuse sums that are further apart and would read twice.
                pairs = [(value.square(), (value * small).abs().clamp(min=floor).square()) for value in chosen]
                sums, checks = torch.stack([_sum(one) for pair in pairs for one in pair]).view(-1, 2).unbind(1)
                squares = squares + total(torch.where(torch.isfinite(sums), sums, checks * large).sum(), over)
                finite = finite & torch.isfinite(checks).all()
    return squares, ~any_rank(~finite, leaves)


def flag_and_norm(
    state: ScalerState, squares: Tensor, finite: Tensor, reduce: Reduce | None
) -> tuple[ScalerState, Tensor]:
    """Return the state with its flag, and the norm in float64."""
    flag = ((state.found_inf != 0) | ~finite).float()
    if reduce is not None:
        flag = reduced("step", "parallel", reduce, flag)
    return replace(state, found_inf=flag), squares.sqrt()


def _parts(leaf: Tensor) -> list[Tensor]:
    """Split a large gradient on a CPU into rows and a rest; return any other as it is."""
    plain = leaf.device.type == "cpu" and leaf.layout == torch.strided and not leaf.is_complex()
    if not plain or leaf.numel() < 2 * _ROW or not leaf.is_contiguous():
        return [leaf]
    flat, whole = leaf.reshape(-1), leaf.numel() // _ROW * _ROW
    return [flat[:whole].view(-1, _ROW), *([flat[whole:]] if whole < leaf.numel() else [])]


def _sum(squares: Tensor) -> Tensor:
    """Sum in float32 along rows and in float64 over them; in float64 for float64."""
    if squares.dim() == 2 and squares.shape[1] == _ROW:
        return widen(squares.sum(1)).sum()
    return widen(squares.sum())


def unscaled_gradients(state: ScalerState, grads: Tree) -> Tree:
    """Return unscaled gradients; compiled, they are computed in the optimizer's loop."""
    inv_scale = _tree.settled(reciprocal(state.scale))
    return _tree.map_leaves(lambda leaf: unscaled(leaf, inv_scale), *_tree.flatten(grads))
