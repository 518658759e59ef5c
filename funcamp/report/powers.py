"""The power of the loss scale with which a number grows that is computed from gradients.

A norm grows with the scale, a dot product of two gradients with its square, and their cosine does not grow.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch

from funcamp.report.events import Key
from funcamp.report.lines import Line
from funcamp.report.tensors import is_plain
from funcamp._types import Args
from funcamp._upstream.modes import without_modes


class Power(NamedTuple):
    """How a tensor that is computed from gradients grows with the scale, if the gradients are scaled."""

    parameters: tuple[Key, ...]
    """The parameters of the gradients."""
    degree: float = 1.0
    """The power of the scale."""
    read_ids: tuple[int, ...] = ()
    """The reads of gradients, such as norms, from which it is computed."""
    is_certain: bool = True
    """Whether nothing else went into it that may have been computed from gradients of an earlier pass."""
    free_line: Line | None = None
    """If the degree is 0: where it became free of the scale."""
    finite_line: Line | None = None
    """Where inf and NaN in it were replaced by numbers."""
    reduced_line: Line | None = None
    """Where it was gathered from all ranks."""


#: The result grows with the same power of the scale as the input that grows most.
_SAME = {"sum", "mean", "max", "amax", "min", "amin", "std", "norm", "linalg_vector_norm", "median", "sort", "topk"}
_SAME |= {"abs", "neg", "clone", "_to_copy", "stack", "cat", "add", "sub", "_local_scalar_dense", "histc"}
_SAME |= {"view", "_unsafe_view", "unsqueeze", "squeeze", "expand", "detach", "alias", "unbind", "select", "slice"}
_SAME |= {"split", "split_with_sizes", "t", "transpose", "permute", "as_strided", "index", "gather"}
#: The degree of the result is that of the only input times this number.
_FACTORS = {"var": 2.0, "square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
_PRODUCTS = {"mul", "dot", "vdot", "mv", "mm"}
COMPARISONS = {"gt", "lt", "ge", "le"}
BOUNDS = {"clamp", "clamp_min", "clamp_max", "minimum", "maximum"}
#: Operations that decide by a number.
DECISIONS = COMPARISONS | BOUNDS
#: Operations that read a number on the host.
HOST_READS = {"_local_scalar_dense", "histc"}

#: A bound that is not larger is an epsilon: it only keeps a division from zero.
_LARGEST_EPSILON = 1e-3
#: A bound that is not smaller only finds what float16 cannot represent.
_SMALLEST_INFINITE = 65504.0
#: A loop that divides by the scale may divide by this multiple of it too: by micro-batches or by ranks.
_LARGEST_MULTIPLE = 64


def combined(powers: list[Power], degree: float) -> Power:
    """Return the power of what is computed from several tensors, with its degree."""
    parameters = tuple([key for power in powers for key in power.parameters])
    read_ids = tuple([read_id for power in powers for read_id in power.read_ids])
    return Power(
        parameters,
        degree,
        read_ids,
        is_certain=all(power.is_certain for power in powers),
        free_line=_first(power.free_line for power in powers),
        finite_line=_first(power.finite_line for power in powers),
        reduced_line=_first(power.reduced_line for power in powers),
    )


def _first(lines: Iterable[Line | None]) -> Line | None:
    return next((line for line in lines if line is not None), None)


def degree_of(name: str, arguments: Args, powers: list[Power | None], scales: Collection[float]) -> float | None:
    """Return the degree of an operation's result; None if it is unknown.

    Args:
        name: the operation.
        arguments: its arguments.
        powers: the power of each argument; None for an argument that is not computed from gradients. At least one is.
        scales: the scales that scalers had.
    """
    degrees = [power.degree for power in powers if power is not None]
    if name in _SAME or name in BOUNDS:
        return max(degrees, key=abs)
    if name in _FACTORS:
        return degrees[0] * _FACTORS[name]
    if name == "pow":
        exponent = arguments[1]
        return degrees[0] * exponent if isinstance(exponent, (int, float)) else None
    if len(arguments) >= 2 and (name in _PRODUCTS or name == "div"):
        return degree_of_product(name, arguments, powers, scales)
    return None


def depends_on_scale(arguments: Args, powers: list[Power | None], scales: Collection[float]) -> bool:
    """Return whether the result of one of `DECISIONS` changes with the scale.

    It does not if all sides grow alike, or if a number is compared with zero, with inf, or with the scale itself.
    """
    degrees = {power.degree for power in powers if power is not None}
    if len(degrees) > 1:
        return True
    (degree,) = degrees
    limits = [_number(argument) for argument, power in zip(arguments, powers) if power is None and argument is not None]
    return bool(degree) and not all(limit is not None and _is_free_of_scale(limit, scales) for limit in limits)


def degree_of_product(
    name: str, arguments: Args, powers: list[Power | None], scales: Collection[float]
) -> float | None:
    """Return the degree of a product or quotient; None if a factor may be the scale."""
    factors = [_number(argument) for argument, power in zip(arguments[:2], powers) if power is None]
    # Without a scaler, any number may be the loop's own scale.
    if any(factor is not None and (not scales or is_of_scale(factor, scales)) for factor in factors):
        return None
    first, second = [0.0 if power is None else power.degree for power in powers[:2]]
    return first - second if "div" in name else first + second


def divides_by_scale(name: str, arguments: Args, scales: Collection[float]) -> bool:
    """Return whether an operation certainly divides gradients in place by a scale, with no other factor.

    A small scale may be another number, such as that of the micro-batches.
    """
    number = _number(arguments[1]) if len(arguments) > 1 else None
    if not number:
        return False
    divisor = number if "div_" in name else 1 / number if "mul_" in name else 0.0
    return any(scale > _LARGEST_MULTIPLE and math.isclose(divisor, scale, rel_tol=1e-6) for scale in scales)


def is_of_scale(number: float, scales: Collection[float]) -> bool:
    """Return whether a number is a scale, its inverse, or a small multiple or fraction of them."""
    if not number or not math.isfinite(number):
        return False
    ratios = [ratio for scale in scales if scale for ratio in (abs(number) / scale, abs(number) * scale)]
    return any(_is_small_multiple(ratio) or _is_small_multiple(1 / ratio) for ratio in ratios)


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
