"""What is computed from gradients, and whether it still grows with the scale of the loss.

A norm grows with the scale. A quotient of two norms does not, and is forgotten, as is what a factor may have unscaled.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch

from funcamp.report.events import Key
from funcamp.report.lines import Line
from funcamp.report.tensors import is_plain
from funcamp.report.torch_names import Args, without_modes


class Derived(NamedTuple):
    """A tensor that is computed from gradients and grows with the scale, if they do."""

    parameters: tuple[Key, ...]
    """The parameters of the gradients."""
    read_ids: tuple[int, ...] = ()
    """The reads of gradients, such as norms, from which it is computed; none for gradients."""
    finite_line: Line | None = None
    """Where inf and NaN in it were replaced by numbers."""


#: Operations whose result grows with the scale if an input does, with the same power or another one.
_KEEPING = {"sum", "mean", "max", "amax", "min", "amin", "std", "norm", "linalg_vector_norm", "median", "sort", "topk"}
_KEEPING |= {"abs", "neg", "clone", "_to_copy", "stack", "cat", "add", "sub", "_local_scalar_dense", "histc"}
_KEEPING |= {"view", "_unsafe_view", "unsqueeze", "squeeze", "expand", "detach", "alias", "unbind", "select", "slice"}
_KEEPING |= {"split", "split_with_sizes", "t", "transpose", "permute", "as_strided", "index", "gather"}
_KEEPING |= {"var", "square", "sqrt", "rsqrt", "reciprocal", "pow", "dot", "vdot"}
PRODUCTS = {"mul", "div"}
COMPARISONS = {"gt", "lt", "ge", "le"}
BOUNDS = {"clamp", "clamp_min", "clamp_max", "minimum", "maximum"}
#: Operations that decide by a number.
DECISIONS = COMPARISONS | BOUNDS
#: Operations that read a number on the host.
HOST_READS = {"_local_scalar_dense", "histc"}
FOLLOWED = _KEEPING | PRODUCTS | DECISIONS

#: A bound that is not larger is an epsilon: it only keeps a division from zero.
_LARGEST_EPSILON = 1e-3
#: A bound that is not smaller only finds what float16 cannot represent.
_SMALLEST_INFINITE = 65504.0
#: A loop that divides by the scale may divide by this multiple of it too: by micro-batches or by ranks.
_LARGEST_MULTIPLE = 64


def joined(parts: list[Derived]) -> Derived:
    """Return what is computed from several tensors together."""
    return Derived(
        parameters=tuple([key for part in parts for key in part.parameters]),
        read_ids=tuple([read_id for part in parts for read_id in part.read_ids]),
        finite_line=_first(part.finite_line for part in parts),
    )


def _first(lines: Iterable[Line | None]) -> Line | None:
    return next((line for line in lines if line is not None), None)


def keeps_scale(name: str, arguments: Args, known: list[Derived | None], scales: Collection[float]) -> bool:
    """Return whether an operation's result certainly grows with the scale.

    Args:
        name: the operation.
        arguments: its arguments.
        known: what each argument is; None if it is not computed from gradients. At least one is.
        scales: the scales that scalers had.
    """
    if name in PRODUCTS:
        factors = [_number(argument) for argument, part in zip(arguments[:2], known) if part is None]
        # Without a scaler, any number may be the loop's own scale.
        if any(factor is not None and (not scales or is_of_scale(factor, scales)) for factor in factors):
            return False
        return name == "mul" or known[:2].count(None) == 1
    return name in _KEEPING or name in BOUNDS


def depends_on_scale(arguments: Args, known: list[Derived | None], scales: Collection[float]) -> bool:
    """Return whether the result of one of `DECISIONS` changes with the scale.

    It does not if all sides grow, or if a number is compared with zero, with inf, or with the scale itself.
    """
    limits = [_number(argument) for argument, part in zip(arguments, known) if part is None and argument is not None]
    return not all(limit is not None and _is_free_of_scale(limit, scales) for limit in limits)


def is_of_scale(number: float, scales: Collection[float]) -> bool:
    """Return whether a number is a scale, its inverse, or a small multiple or fraction of them."""
    if not number or not math.isfinite(number):
        return False
    ratios = [ratio for scale in scales if scale for ratio in (abs(number) / scale, abs(number) * scale)]
    return any(_is_small_multiple(ratio) or _is_small_multiple(1 / ratio) for ratio in ratios)


def divides_by_scale(name: str, argument: object, scales: Collection[float]) -> bool:
    """Return whether a product certainly divides by a scale. A small one may be another number."""
    number = _number(argument)
    if not number:
        return False
    divisor = number if "div" in name else 1 / number
    return any(scale > _LARGEST_MULTIPLE and math.isclose(divisor, scale, rel_tol=1e-6) for scale in scales)


def _is_small_multiple(ratio: float) -> bool:
    return 0.5 < ratio <= _LARGEST_MULTIPLE and math.isclose(ratio, round(ratio), rel_tol=1e-4)


def _is_free_of_scale(limit: float, scales: Collection[float]) -> bool:
    """Return whether a comparison with this number has the same result at every scale."""
    size = abs(limit)
    return not _LARGEST_EPSILON < size < _SMALLEST_INFINITE or is_of_scale(limit, scales)


def _number(argument: object) -> float | None:
    """Return a number, also of a tensor of shape (); None for anything else. Waits for the device."""
    if isinstance(argument, (int, float)):
        return float(argument)
    if is_plain(argument) and argument.dim() == 0 and argument.is_floating_point():
        with without_modes(), torch.no_grad():
            return float(argument)
    return None
