"""The power of the loss scale with which a number grows that is computed from gradients.

A norm grows with the scale, a dot product of two gradients with its square, and their cosine does not grow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from funcamp._audit.events import Key
from funcamp._types import Args


class Power(NamedTuple):
    """How a tensor that is computed from gradients grows with the scale, if the gradients are scaled."""

    parameters: tuple[Key, ...]
    """The parameters of the gradients."""
    degree: float = 1.0
    """The power of the scale."""
    read_ids: tuple[int, ...] = ()
    """The reads of gradients, such as norms, from which it is computed."""


#: The result grows with the same power of the scale as the input that grows most.
_SAME = {"sum", "mean", "max", "amax", "min", "amin", "maximum", "minimum", "std", "norm", "linalg_vector_norm"}
_SAME |= {"_foreach_norm", "abs", "_foreach_abs", "neg", "clone", "_to_copy", "stack", "cat", "add", "sub", "clamp"}
_SAME |= {"clamp_min", "clamp_max", "view", "_unsafe_view", "unsqueeze", "squeeze", "expand", "detach", "alias"}
_SAME |= {"unbind", "_local_scalar_dense", "histc", "select"}
#: The degree of the result is that of the only input times this number.
_FACTORS = {"var": 2.0, "square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
_PRODUCTS = {"mul", "dot", "vdot", "mv", "mm"}
_COMPARISONS = {"gt", "lt", "ge", "le"}
#: Operations that read a number on the host, or decide by it.
USES = {"_local_scalar_dense", "histc", *_COMPARISONS}


def combined(powers: list[Power], degree: float) -> Power:
    """Return the power of what is computed from several tensors, with its degree."""
    parameters = tuple([key for power in powers for key in power.parameters])
    read_ids = tuple([read_id for power in powers for read_id in power.read_ids])
    return Power(parameters, degree, read_ids)


def degree_of(name: str, arguments: Args, powers: list[Power | None], scales: Iterable[float]) -> float | None:
    """Return the degree of an operation's result; None if it is unknown.

    Args:
        name: the operation.
        arguments: its arguments.
        powers: the power of each argument; None for an argument that is not computed from gradients. At least one is.
        scales: the numbers that scalers returned as their scales.
    """
    degrees = [power.degree for power in powers if power is not None]
    if name in _SAME:
        return max(degrees, key=abs)
    if name in _FACTORS:
        return degrees[0] * _FACTORS[name]
    if name == "pow":
        exponent = arguments[1]
        return degrees[0] * exponent if isinstance(exponent, (int, float)) else None
    if len(arguments) < 2:
        return None
    if name in _COMPARISONS:
        first, second = _first_two_degrees(powers)
        return first - second  # 0 if both sides grow alike: their order does not depend on the scale
    if name in _PRODUCTS or name == "div":
        return _degree_of_product(name, arguments, powers, scales)
    return None


def _degree_of_product(name: str, arguments: Args, powers: list[Power | None], scales: Iterable[float]) -> float | None:
    """Return the degree of a product or quotient; 0 if a factor may be the scale, None if it is unknown.

    A gradient times a number has an unknown degree, because the loop may unscale the gradient by that number.
    """
    factors = [argument for argument, power in zip(arguments, powers) if power is None]
    is_of_gradients = not any(power.read_ids for power in powers if power is not None)
    if is_of_gradients and any(isinstance(factor, (int, float)) for factor in factors):
        return None
    if any(_may_be_scale(factor, scales) for factor in factors):
        return 0.0
    first, second = _first_two_degrees(powers)
    return first - second if name == "div" else first + second


def _first_two_degrees(powers: list[Power | None]) -> tuple[float, float]:
    """Return the degrees of the first two arguments; 0 for an argument that is not computed from gradients."""
    first, second = [0.0 if power is None else power.degree for power in powers[:2]]
    return first, second


def _may_be_scale(factor: object, scales: Iterable[float]) -> bool:
    """Return whether a factor is a tensor of shape (), or a scale or its inverse that a scaler returned."""
    if isinstance(factor, Tensor):
        return factor.dim() == 0
    if not isinstance(factor, (int, float)) or not factor:
        return False
    return any(math.isclose(factor, scale) or math.isclose(factor, 1 / scale) for scale in scales if scale)
